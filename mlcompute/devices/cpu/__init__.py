"""The CPU engine: oneDNN for matmul and convolution, LLVM loops for everything else, one native call per pass."""
