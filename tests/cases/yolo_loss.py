"""The YOLO loss against the published formula, written box by box in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name PyTorch's own documentation uses)

from mlcompute.layers.yolo_loss import YOLOLossDescriptor, YOLOLossLayer
from tests.cases.case import Array, Case, Refusal, numbers

ANCHORS = np.array([[1.0, 2.0], [3.0, 3.0], [2.0, 0.5]], np.float32)


def make(anchors: Array = ANCHORS, **settings: Any) -> Callable[[], YOLOLossLayer]:
    def layer() -> YOLOLossLayer:
        d = YOLOLossDescriptor(anchors, len(anchors))
        for name, value in settings.items():
            setattr(d, name, value)
        return YOLOLossLayer(d)

    return layer


def iou(centre: torch.Tensor, wh: torch.Tensor, true_centre: torch.Tensor, true_wh: torch.Tensor) -> torch.Tensor:
    """Overlap of boxes whose last axis is (x, y)."""
    high = torch.minimum(centre + wh / 2, true_centre + true_wh / 2)
    low = torch.maximum(centre - wh / 2, true_centre - true_wh / 2)
    both = (high - low).clamp(min=0).prod(-1)
    return both / (wh.prod(-1) + true_wh.prod(-1) - both)


def oracle(
    anchors: Array = ANCHORS,
    should_rescore: bool = True,
    scale_spatial_position_loss: float = 10.0,
    scale_spatial_size_loss: float = 10.0,
    scale_no_object_confidence_loss: float = 5.0,
    scale_object_confidence_loss: float = 100.0,
    scale_class_loss: float = 2.0,
    minimum_iou_for_object_presence: float = 0.7,
    maximum_iou_for_object_absence: float = 0.3,
) -> Callable[..., torch.Tensor]:
    def loss(_: Any, prediction: torch.Tensor, labels: torch.Tensor, weights: Any = None) -> torch.Tensor:
        n, channels, height, width = prediction.shape
        count = len(anchors)
        box = torch.from_numpy(anchors).double()
        # (n, h, w, anchor, channel): the last axis is one anchor's answer for one cell.
        x, t = (
            v.double().reshape(n, count, channels // count, height, width).permute(0, 3, 4, 1, 2)
            for v in (prediction, labels)
        )
        xy, raw_wh, raw_confidence, scores = x[..., :2].sigmoid(), x[..., 2:4], x[..., 4], x[..., 5:]
        true_xy, true_wh, has_object, classes = t[..., :2], t[..., 2:4].clamp(min=0), t[..., 4] == 1, t[..., 5:]
        origin = torch.zeros(2, dtype=torch.float64)
        fit = iou(origin, box.expand_as(true_wh), origin, true_wh)
        best = fit == fit.amax(-1, keepdim=True)
        obj = has_object & (best | (fit > minimum_iou_for_object_presence))
        noobj = ~obj & (fit < maximum_iou_for_object_absence)
        overlap = iou(xy, raw_wh.clamp(-300, 300).exp() * box, true_xy, true_wh).detach()
        wanted = torch.where(obj, overlap if should_rescore else torch.ones_like(overlap), 0.0)
        target = (true_wh / box + 1e-5).log()
        each = scale_spatial_position_loss * obj * (xy - true_xy).square().sum(-1)
        each = each + scale_spatial_size_loss * obj * F.huber_loss(raw_wh, target, reduction="none").sum(-1)
        factor = scale_object_confidence_loss * obj.double() + scale_no_object_confidence_loss * noobj.double()
        each = each + factor * F.binary_cross_entropy_with_logits(raw_confidence, wanted, reduction="none")
        each = each - scale_class_loss * obj * (classes * scores.log_softmax(-1)).sum(-1)
        losses = each.sum((1, 2, 3))
        return losses if weights is None else losses * weights.reshape(n)

    return loss


def scene(n: int, classes: int, height: int, width: int, anchors: Array = ANCHORS, share: float = 0.4) -> Array:
    """Labels: in a share of the cells a box of some anchor's rough size, the same for every anchor of the cell."""
    rng = np.random.default_rng([n, classes, height, width])
    t = np.zeros((n, len(anchors), 5 + classes, height, width), np.float32)
    for sample, row, column in np.ndindex(n, height, width):
        if rng.random() < share:
            wh = anchors[rng.integers(len(anchors))] * rng.uniform(0.7, 1.4, 2)
            cell = t[sample, :, :, row, column]
            cell[:, :5] = (*rng.uniform(0.1, 0.9, 2), *wh, 1.0)
            if classes:
                cell[:, 5 + rng.integers(classes)] = 1.0
    return t.reshape(n, -1, height, width)


RESCORED = "the confidence target follows the prediction but carries no gradient, so differences see more than it"


def yolo(name: str, shape: tuple[int, int, int, int], anchors: Array = ANCHORS, **settings: Any) -> Case:
    """`shape` is (samples, classes, height, width)."""
    n, classes, height, width = shape
    channels = len(anchors) * (5 + classes)
    return Case(
        name,
        make(anchors, **settings),
        [(n, channels, height, width)],
        oracle(anchors, **settings),
        [scene(*shape, anchors)],
        smooth=not settings.get("should_rescore", True),
        note=RESCORED if settings.get("should_rescore", True) else "",
    )


def with_sizes(low: float, high: float) -> Array:
    """Predictions whose raw sizes swing between two values."""
    x = numbers(2, 3 * 7, 3, 3).reshape(2, 3, 7, 3, 3)
    x[:, :, 2], x[:, :, 3] = low, high
    return x.reshape(2, 21, 3, 3)


TWINS = np.array([[1.0, 2.0], [2.0, 1.0]], np.float32)
TIED = scene(2, 2, 3, 3, TWINS).reshape(2, 2, 7, 3, 3)
TIED[:, :, 2:4] = TIED[:, :, 4:5]
GARBAGE = scene(2, 2, 3, 3).reshape(2, 3, 7, 3, 3)
GARBAGE[:, :, 2:4] -= 1.0 - GARBAGE[:, :, 4:5]

CASES = [
    yolo("three anchors, four classes", (2, 4, 3, 5)),
    yolo("without rescoring", (2, 4, 3, 5), should_rescore=False),
    yolo("batch of one", (1, 3, 4, 4)),
    yolo("one cell", (3, 2, 1, 1), should_rescore=False),
    yolo("one anchor", (2, 3, 4, 3), ANCHORS[1:2], should_rescore=False),
    yolo("one class", (2, 1, 3, 3)),
    yolo("no classes", (2, 0, 3, 3), should_rescore=False),
    yolo("other scales", (2, 2, 3, 3), should_rescore=False, scale_spatial_position_loss=1.5,
         scale_spatial_size_loss=0.5, scale_no_object_confidence_loss=2.0, scale_object_confidence_loss=3.0,
         scale_class_loss=0.25),
    yolo("classes only", (2, 3, 3, 3), should_rescore=False, scale_spatial_position_loss=0.0,
         scale_spatial_size_loss=0.0, scale_no_object_confidence_loss=0.0, scale_object_confidence_loss=0.0),
    yolo("many responsible anchors", (2, 2, 4, 4), minimum_iou_for_object_presence=0.1),
    yolo("only the best anchor", (2, 2, 4, 4), should_rescore=False, minimum_iou_for_object_presence=1.0),
    yolo("no confidence ignored", (2, 2, 4, 4), should_rescore=False, maximum_iou_for_object_absence=1.0),
    yolo("no empty boxes", (2, 2, 4, 4), should_rescore=False, maximum_iou_for_object_absence=0.0),
    Case(
        "no objects at all",
        make(),
        [(2, 21, 3, 3)],
        oracle(),
        [np.zeros((2, 21, 3, 3), np.float32)],
    ),
    Case(
        "equal fits: every one of them is responsible",
        make(TWINS, should_rescore=False),
        [(2, 14, 3, 3)],
        oracle(TWINS, should_rescore=False),
        [TIED.reshape(2, 14, 3, 3)],
    ),
    Case(
        "sizes that overflow",
        make(),
        [with_sizes(500.0, -500.0)],
        oracle(),
        [scene(2, 2, 3, 3)],
        smooth=False,
        note=RESCORED,
    ),
    Case(
        "negative sizes where there is no object",
        make(),
        [(2, 21, 3, 3)],
        oracle(),
        [GARBAGE.reshape(2, 21, 3, 3)],
        smooth=False,
        note=RESCORED,
    ),
    Case(
        "confidence 0.5 is no object",
        make(should_rescore=False),
        [(2, 21, 3, 3)],
        oracle(should_rescore=False),
        [scene(2, 2, 3, 3) * np.float32(0.5)],
    ),
    Case(
        "labels with the grid as one axis",
        make(should_rescore=False),
        [(2, 21, 3, 3)],
        oracle(should_rescore=False),
        [scene(2, 2, 3, 3).reshape(2, 21, 9)],
    ),
    Case(
        "fed weights, one per sample",
        make(should_rescore=False),
        [(3, 21, 2, 2)],
        oracle(should_rescore=False),
        [scene(3, 2, 2, 2)],
        weights=numbers(3, seed=5),
    ),
]  # fmt: skip


def described(anchors: Any, count: Any = 2) -> Callable[[], YOLOLossLayer]:
    return lambda: YOLOLossLayer(YOLOLossDescriptor(anchors, count))


REFUSALS = [
    Refusal("too few sizes", described([1.0, 2.0, 3.0]), "anchor_boxes has 3 numbers, 2 anchors need 4"),
    Refusal("too many sizes", described(ANCHORS), "anchor_boxes has 6 numbers, 2 anchors need 4"),
    Refusal("bytes that are no float32", described(bytes(17)), "anchor_boxes has 17 bytes"),
    Refusal("no anchors", described([], 0), "anchor_box_count is 0"),
    Refusal("anchor without extent", described([1.0, 2.0, 0.0, 1.0]), "every anchor size must be a positive number"),
    Refusal("infinite anchor", described([1.0, 2.0, np.inf, 1.0]), "every anchor size must be a positive number"),
    Refusal("anchors in words", described("1 2 3 4"), "anchor_boxes must be float32 bytes or numbers", error=TypeError),
    Refusal("count in words", described(ANCHORS, "3"), "anchor_box_count must be a whole number", error=TypeError),
    Refusal("negative scale", make(scale_class_loss=-1.0), "scale_class_loss is -1"),
    Refusal("scale in words", make(scale_class_loss="2"), "scale_class_loss must be a number", error=TypeError),
    Refusal("overlap beyond 1", make(minimum_iou_for_object_presence=1.5), "minimum_iou_for_object_presence is 1.5"),
    Refusal("no descriptor", lambda: YOLOLossLayer(ANCHORS), "must be a YOLOLossDescriptor", error=TypeError),  # type: ignore[arg-type]
    Refusal("rank 3", make(), "the prediction has 3 axes", [(21, 3, 3)], [(21, 3, 3)]),
    Refusal("channels left over", make(), "20 channels cannot be split into 3 anchors", [(2, 20, 3, 3)], [(2, 20, 9)]),
    Refusal("too few channels", make(), "12 channels cannot be split into 3 anchors", [(2, 12, 3, 3)], [(2, 12, 9)]),
    Refusal("other labels", make(), "the labels have 162", [(2, 21, 3, 3)], [(2, 9, 3, 3)]),
    Refusal("no labels", make(), "takes a prediction and its labels", [(2, 21, 3, 3)]),
]  # fmt: skip
