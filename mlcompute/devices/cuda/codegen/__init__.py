"""CUDA C++ as text: types, functions, addresses."""
