"""Training steps on a GPU beside PyTorch and JAX: `python -m benchmarks.gpu`."""
