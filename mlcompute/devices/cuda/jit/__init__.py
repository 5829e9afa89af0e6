"""From CUDA C++ to code of a device: compiled once, kept on disk."""
