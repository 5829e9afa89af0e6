"""Kernels by op family. Each module has a table from op names to makers."""
