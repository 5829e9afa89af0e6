"""Writing LLVM IR: code, SIMD values, loops, addressing, reductions, mathematical functions."""
