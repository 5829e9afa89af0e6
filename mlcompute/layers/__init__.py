"""Layers and their descriptors, a file per family."""
