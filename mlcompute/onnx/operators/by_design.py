"""Operators that are not imported, each with the reason."""

from __future__ import annotations

from mlcompute.onnx.rows import BY_DESIGN

_STRINGS = "strings cannot be computed with"
_SHAPES = "the shape of its result depends on computed numbers"
_RANDOM = "random numbers come from the training graph, not from the model"
_CONTAINERS = "lists and optional values have no place in a graph of tensors"

for _name in ("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer"):
    BY_DESIGN["", _name] = _STRINGS
for _name in ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"):
    BY_DESIGN["", _name] = _RANDOM
for _name in ("Optional", "OptionalGetElement", "OptionalHasElement"):
    BY_DESIGN["", _name] = _CONTAINERS
BY_DESIGN["", "NonMaxSuppression"] = _SHAPES
BY_DESIGN["", "ImageDecoder"] = "it decodes files, it does not compute"
BY_DESIGN["", "MaxRoiPool"] = "the size of each cell depends on computed regions"
for _name in (
    "Binarizer", "CastMap", "CategoryMapper", "DictVectorizer", "FeatureVectorizer", "Imputer", "LabelEncoder",
    "LinearClassifier", "LinearRegressor", "OneHotEncoder", "SVMClassifier", "SVMRegressor", "TreeEnsemble",
    "TreeEnsembleClassifier", "TreeEnsembleRegressor",
):  # fmt: skip
    BY_DESIGN["ai.onnx.ml", _name] = "trees, encoders and the like are not networks"
BY_DESIGN["ai.onnx.ml", "ZipMap"] = "it makes a dictionary of every row: convert with the option zipmap=False"
