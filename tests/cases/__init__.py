"""The table of layer cases: one file per family, mirroring mlcompute/layers. `tests/test_layers.py` asks them all."""
