"""The CPU engine: oneDNN for contractions, LLVM loops for everything else, one native call per pass."""
