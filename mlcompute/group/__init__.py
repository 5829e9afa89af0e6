"""Many processes that train one graph: who they are, and how numbers get from one to another."""

from mlcompute.foreign_names import answer_foreign_keywords
from mlcompute.group.group import Group

__all__ = ["Group"]

answer_foreign_keywords([Group])
