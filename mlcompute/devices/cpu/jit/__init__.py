"""From LLVM IR to machine code in memory: compiling, linking, caching."""
