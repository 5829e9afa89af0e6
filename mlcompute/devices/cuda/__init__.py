"""The CUDA engine: cuBLASLt and cuDNN for matmul and convolution, generated CUDA C++ for everything else."""
