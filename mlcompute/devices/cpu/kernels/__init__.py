"""Kernels of the CPU engine, a file per op family. Each file gives rows of the table op name -> kernel maker."""
