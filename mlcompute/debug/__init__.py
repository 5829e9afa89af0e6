"""Debugging: the first bad value of a run (`find_nan`), gradients against exact ones (`gradients`)."""

from __future__ import annotations

from mlcompute.debug.find_nan import Finding, find_nan

__all__ = ["Finding", "find_nan"]
