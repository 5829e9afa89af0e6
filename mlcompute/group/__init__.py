"""Many processes that train one graph: who they are, and how numbers get from one to another."""

from mlcompute.group.group import Group

__all__ = ["Group"]
