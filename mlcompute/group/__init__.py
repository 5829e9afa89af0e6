"""Distributed training: the processes of a group and how they exchange data."""

from mlcompute.foreign_names import answer_foreign_keywords
from mlcompute.group.group import Group

__all__ = ["Group"]

answer_foreign_keywords([Group])
