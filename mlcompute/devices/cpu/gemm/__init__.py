"""Matrix multiplication: oneDNN's sgemm and our own kernels."""
