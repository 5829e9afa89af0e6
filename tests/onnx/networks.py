"""The nine full-size networks that come with ONNX: shapes of real ones, constant weights, and the output to expect."""

from __future__ import annotations

import functools
import os

import numpy as np
import onnx
from onnx import numpy_helper

LIGHT = os.path.join(os.path.dirname(onnx.__file__), "backend", "test", "data", "light")
MODELS = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19",
    "zfnet512",
)  # fmt: skip


@functools.cache
def expected(name: str) -> np.ndarray:
    tensor = onnx.TensorProto()
    with open(os.path.join(LIGHT, f"light_{name}_output_0.pb"), "rb") as file:
        tensor.ParseFromString(file.read())
    return numpy_helper.to_array(tensor)
