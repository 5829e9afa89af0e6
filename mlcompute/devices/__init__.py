"""Engines: places where programs run. `device.py` is the contract, the other files fulfil it."""
