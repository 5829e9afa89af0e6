"""YOLO loss: where boxes are, how large, whether there is one, and what is in it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute import ops
from mlcompute.enums import LossType, ReductionType
from mlcompute.errors import DataError, ShapeError
from mlcompute.foreign_names import expect_attribute
from mlcompute.layers.arguments import between, whole
from mlcompute.layers.layer import Forward
from mlcompute.layers.loss import LossDescriptor, LossLayer
from mlcompute.layers.loss_formulas import huber, sigmoid_cross_entropy, softmax_cross_entropy
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.tensor import TensorDescriptor
from mlcompute.tensor_data import TensorData

#: Channels of an anchor before its class scores: x, y, w, h, confidence.
_BOX_CHANNELS = 5

#: Sizes of e^±30 anchors overlap nothing and everything as far as float32 can tell; beyond, areas would overflow.
_LARGEST_LOG_SIZE = 30.0

_SCALES = (
    "scale_spatial_position_loss",
    "scale_spatial_size_loss",
    "scale_no_object_confidence_loss",
    "scale_object_confidence_loss",
    "scale_class_loss",
)
_THRESHOLDS = ("minimum_iou_for_object_presence", "maximum_iou_for_object_absence")


class YOLOLossDescriptor:
    """Anchor boxes and the factors of a YOLO loss. All but the anchors may be changed until a layer is made.

    anchor_boxes  width and height of each anchor in grid cells: float32 bytes, a flat list or an (anchors, 2) array

    >>> import mlcompute as mlc
    >>> mlc.YOLOLossDescriptor([1.0, 2.0, 3.0, 3.0], 2).scale_class_loss
    2.0
    """

    anchor_box_count = ReadOnly[int]("Number of anchors.")
    anchor_boxes = ReadOnly[bytes]("w0, h0, w1, h1, ... in grid cells, as float32.")

    def __init__(self, anchor_boxes: Any, anchor_box_count: int) -> None:
        who = "YOLOLossDescriptor"
        self._anchor_box_count = whole(who, "anchor_box_count", anchor_box_count, 1)
        self._anchor_boxes = _float32_bytes(who, anchor_boxes)
        sizes = self.anchor_boxes_array
        if sizes.size != 2 * self._anchor_box_count:
            raise ShapeError(
                f"{who}: anchor_boxes has {sizes.size} numbers, {self._anchor_box_count} anchors need "
                f"{2 * self._anchor_box_count}: width and height of each"
            )
        if not (np.isfinite(sizes) & (sizes > 0)).all():
            raise DataError(f"{who}: every anchor size must be a positive number", anchor_boxes=sizes.tolist())
        #: Is the confidence a responsible box should have the overlap of predicted and true box, rather than 1?
        self.should_rescore = True
        #: Factor on the loss of x and y.
        self.scale_spatial_position_loss = 10.0
        #: Factor on the loss of w and h.
        self.scale_spatial_size_loss = 10.0
        #: Factor on the loss of the confidence where there is no object.
        self.scale_no_object_confidence_loss = 5.0
        #: Factor on the loss of the confidence where there is one.
        self.scale_object_confidence_loss = 100.0
        #: Factor on the loss of the classes.
        self.scale_class_loss = 2.0
        #: An anchor that overlaps the true box by more than this is responsible for it.
        self.minimum_iou_for_object_presence = 0.7
        #: An anchor that overlaps it by less than this should report no object.
        self.maximum_iou_for_object_absence = 0.3

    if not TYPE_CHECKING:  # a type checker would let every name be set

        def __setattr__(self, name: str, value: Any) -> None:
            if name[0] != "_":
                expect_attribute(self, name, ("should_rescore", *_SCALES, *_THRESHOLDS))
            super().__setattr__(name, value)

    @property
    def anchor_boxes_array(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """`anchor_boxes` as numbers: width and height of one after the other."""
        return np.frombuffer(self._anchor_boxes, np.float32)

    def copy(self) -> YOLOLossDescriptor:
        """An equal, independent descriptor."""
        return copy.copy(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, YOLOLossDescriptor) and vars(self) == vars(other)

    def __repr__(self) -> str:
        anchors = self.anchor_boxes_array.reshape(-1, 2).tolist()
        rest = ", ".join(f"{name}={getattr(self, name)}" for name in ("should_rescore", *_SCALES, *_THRESHOLDS))
        return f"YOLOLossDescriptor({anchors}, {rest})"


class YOLOLossLayer(LossLayer):
    """One loss per sample: squared errors of positions, Huber of sizes, cross entropies of confidence and classes.

    prediction, labels (n, anchors * (5 + classes), h, w)   ->   (n,)

    Per anchor the channels are x, y, w, h, confidence and the class scores. Labels, repeated for every anchor of a
    cell: the centre of the box within the cell (0 to 1), its size in cells, confidence 1 where there is an object,
    and the class one-hot. Which anchors answer for an object, and how sure they should be, carries no gradient; nor do
    labels get one, as they decide which anchors answer.
    """

    def __init__(self, descriptor: YOLOLossDescriptor) -> None:
        if not isinstance(descriptor, YOLOLossDescriptor):
            raise TypeError(f"YOLOLossLayer: descriptor must be a YOLOLossDescriptor, not {type(descriptor).__name__}")
        # The inherited descriptor says how samples are joined; its type only names the first of the four parts.
        super().__init__(LossDescriptor(LossType.MEAN_SQUARED_ERROR, ReductionType.SUM))
        d = self._yolo_loss_descriptor = copy.copy(descriptor)
        d.should_rescore = bool(d.should_rescore)
        for name in _SCALES:
            setattr(d, name, between("YOLOLossDescriptor", name, getattr(d, name), 0.0))
        for name in _THRESHOLDS:
            setattr(d, name, between("YOLOLossDescriptor", name, getattr(d, name), 0.0, 1.0))

    @property
    def yolo_loss_descriptor(self) -> YOLOLossDescriptor:
        """A copy of what the layer was made with."""
        return self._yolo_loss_descriptor.copy()

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        prediction, labels = sources
        anchors = self._yolo_loss_descriptor.anchor_box_count
        shape = prediction.shape
        self.expect(
            len(shape) == 4,
            f"the prediction has {len(shape)} axes, 4 are needed: (n, anchors * (5 + classes), h, w)",
            prediction=shape,
        )
        self.expect(
            shape[1] % anchors == 0 and shape[1] // anchors >= _BOX_CHANNELS,
            f"{shape[1]} channels cannot be split into {anchors} anchors of 5 channels and the class scores each",
            prediction=shape,
            fix=f"make it {anchors} * (5 + classes) channels",
        )
        self._check_labels(prediction, labels)
        return [TensorDescriptor((shape[0],), data_type=prediction.data_type)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        prediction, labels = sources
        d = self._yolo_loss_descriptor
        n, channels, height, width = prediction.shape
        anchors = d.anchor_box_count
        # Cells do not know where they are, so the grid is one axis: (n, anchors, 5 + classes, cells).
        grid = (n, anchors, channels // anchors, height * width)
        x = ops.reshape(prediction, grid)
        t = ops.stop_gradient(ops.reshape(ops.convert(labels, x.dtype), grid))
        sizes = x.trace.constant(d.anchor_boxes_array.reshape(1, anchors, 2, 1), x.dtype)

        raw_xy, raw_wh, raw_confidence = _part(x, 0, 2), _part(x, 2, 4), _part(x, 4, 5)
        true_xy, true_wh, true_confidence = _part(t, 0, 2), ops.relu(_part(t, 2, 4)), _part(t, 4, 5)
        xy = ops.sigmoid(raw_xy)

        fit = _overlap(ops.minimum(sizes, true_wh), sizes, true_wh)
        best = ops.logical_or(fit >= ops.max_(fit, (1,)), fit > d.minimum_iou_for_object_presence)
        is_object = ops.logical_and(ops.equal(true_confidence, 1.0), best)
        is_empty = ops.logical_and(ops.logical_not(is_object), fit < d.maximum_iou_for_object_absence)
        objects, empties = ops.convert(is_object, x.dtype), ops.convert(is_empty, x.dtype)

        offset = xy - true_xy
        position = d.scale_spatial_position_loss * (objects * (offset * offset))
        # Chosen before the loss rather than multiplied after it: a runaway size elsewhere stays out of it.
        stretch = ops.select(is_object, raw_wh - ops.log(true_wh / sizes + 1e-5), 0.0)
        size = d.scale_spatial_size_loss * huber(stretch, 1.0)
        wanted = objects
        if d.should_rescore:
            limited = ops.minimum(ops.maximum(raw_wh, -_LARGEST_LOG_SIZE), _LARGEST_LOG_SIZE)
            wh = ops.exp(limited) * sizes
            end = ops.minimum(xy + 0.5 * wh, true_xy + 0.5 * true_wh)
            start = ops.maximum(xy - 0.5 * wh, true_xy - 0.5 * true_wh)
            overlap = _overlap(ops.relu(end - start), wh, true_wh)
            wanted = ops.select(is_object, ops.stop_gradient(overlap), 0.0)
        factor = d.scale_object_confidence_loss * objects + d.scale_no_object_confidence_loss * empties
        parts = [position, size, factor * sigmoid_cross_entropy(raw_confidence, wanted)]
        if grid[2] > _BOX_CHANNELS:
            scores, classes = _part(x, _BOX_CHANNELS, grid[2]), _part(t, _BOX_CHANNELS, grid[2])
            parts.append(d.scale_class_loss * (objects * softmax_cross_entropy(scores, classes, axis=2)))
        total = ops.sum_(parts[0], (1, 2, 3))
        for part in parts[1:]:
            total = total + ops.sum_(part, (1, 2, 3))
        losses = ops.reshape(total, (n,))
        weights = run.label_weights(self)
        if weights is not None:
            self.expect(
                weights.size == n, f"label weights of shape {weights.shape} do not fit {n} samples", expected=(n,)
            )
            losses = losses * ops.stop_gradient(ops.convert(ops.reshape(weights, (n,)), x.dtype))
        return losses


def _part(x: Value, start: int, end: int) -> Value:
    return ops.slice_axis(x, 2, start, end)


def _overlap(shared: Value, wh: Value, true_wh: Value) -> Value:
    """Intersection over union of boxes from (width, height) of what they share and of each.   axis 2: 2   ->   1"""
    both, area, true_area = (_part(size, 0, 1) * _part(size, 1, 2) for size in (shared, wh, true_wh))
    return both / (area + true_area - both)


def _float32_bytes(who: str, boxes: Any) -> bytes:
    if isinstance(boxes, (bytes, bytearray, memoryview, TensorData)):
        raw = bytes(boxes.bytes if isinstance(boxes, TensorData) else boxes)
        if len(raw) % 4:
            raise ShapeError(f"{who}: anchor_boxes has {len(raw)} bytes, float32 numbers take 4 each")
        return raw
    try:
        return np.asarray(boxes).astype(np.float32, casting="same_kind").tobytes()
    except (TypeError, ValueError):
        raise TypeError(f"{who}: anchor_boxes must be float32 bytes or numbers, not {boxes!r}") from None
