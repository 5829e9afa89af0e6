"""Builders: `graph.convolution(x, 32, kernel=3, activation="relu")` instead of tensors and descriptors by hand."""

from __future__ import annotations

from mlcompute.building.elementwise import ElementwiseBuilder
from mlcompute.building.images import ImageBuilder
from mlcompute.building.normalizing import NormalizationBuilder
from mlcompute.building.sequences import SequenceBuilder
from mlcompute.building.shapes import ShapeBuilder

__all__ = ["Building"]


class Building(ImageBuilder, SequenceBuilder, NormalizationBuilder, ElementwiseBuilder, ShapeBuilder):
    """The builders every graph has. Each adds plain layers with `node` and answers the result tensor.

    Nothing is hidden: the tensors, descriptors and layers they make are those one would write by hand, and are found
    in `graph.layers` or by name with `graph.layer(name)`. A layer without a name gets its kind and a number (dense1,
    dense2, ...); its tensors are labelled `name.slot`, an activation that comes with it `name_relu`.
    """
