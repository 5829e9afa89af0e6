"""The channels_last pass: images between convolutions lie channels-last, with the same numbers."""

from __future__ import annotations

import numpy as np

from mlcompute import ops
from mlcompute.compiler.channels_last import channels_last
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import Trace, Value, emit_all
from tests.compiler.programs import apply, feed, run

CONVOLUTION = ((1, 1), (1, 1), (1, 1, 1, 1), 1)


def check(trace: Trace, inputs: list[Value], results: list[Value]) -> list[str]:
    """The same numbers; gives the ops that are there afterwards."""
    before = run(trace, inputs, results)
    apply(channels_last, trace, results)
    verify_steps(trace.steps)
    for old, new in zip(before, run(trace, inputs, results), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)
    return [step.op.name for step in trace.steps]


def test_programs_without_images_stay_as_they_are() -> None:
    trace = Trace()
    x = feed(trace, (2, 3, 4, 5))
    y = ops.sum_(ops.relu(x), (1,))
    steps = trace.steps
    apply(channels_last, trace, [y])
    assert trace.steps is steps


def test_a_region_has_transposes_at_its_borders_only() -> None:
    trace = Trace()
    x, v, w = feed(trace, (2, 3, 6, 6)), feed(trace, (4, 3, 3, 3)), feed(trace, (5, 4, 3, 3))
    y = ops.relu(ops.convolution(x, v, *CONVOLUTION))
    z = ops.max_pool(ops.convolution(y, w, *CONVOLUTION), (2, 2), (2, 2), (1, 1), (0, 0, 0, 0))
    names = check(trace, [x, v, w], [z])
    assert names == ["transpose", "copy", "convolution", "relu", "convolution", "max_pool", "transpose"]
    marked = [step.op.name for step in trace.steps if step.attributes.get("channels_last")]
    assert marked == ["convolution", "convolution", "max_pool"]


def test_channels_first_results_are_made_once_and_only_for_those_who_need_them() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 3, 6, 6)), feed(trace, (4, 3, 3, 3))
    y = ops.convolution(x, w, *CONVOLUTION)
    a, b = ops.reshape(y, (2, 144)), ops.reshape(y, (8, 36))
    names = check(trace, [x, w], [a, b])
    assert names.count("transpose") == 2, "one for the source, one for both reshapes"


def test_images_that_are_kept_are_there_channels_first() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 3, 6, 6)), feed(trace, (4, 3, 3, 3))
    y = ops.convolution(x, w, *CONVOLUTION)
    z = ops.relu(y)
    check(trace, [x, w], [y, z])


def test_statistics_per_channel_follow() -> None:
    """A batch norm in the region: its axes are renumbered, its (1, C, 1, 1) operands need no transpose."""
    trace = Trace()
    x, w, scale = feed(trace, (2, 3, 6, 6)), feed(trace, (4, 3, 3, 3)), feed(trace, (1, 4, 1, 1))
    y = ops.convolution(x, w, *CONVOLUTION)
    normalized, mean, variance = emit_all("normalize", y, axes=(0, 2, 3), epsilon=1e-5)
    z = ops.relu(normalized * scale)
    names = check(trace, [x, w, scale], [z, mean, variance])
    step = next(step for step in trace.steps if step.op.name == "normalize")
    assert step.attributes["axes"] == (0, 1, 2)
    assert names.count("transpose") == 2


def test_groups_of_channels_follow() -> None:
    """A group norm between convolutions, its scale and activation: no transpose but at the borders."""
    trace = Trace()
    x, w, v = feed(trace, (2, 3, 6, 6)), feed(trace, (4, 3, 3, 3)), feed(trace, (4, 4, 3, 3))
    scale, dy = feed(trace, (1, 4, 1, 1)), feed(trace, (2, 4, 6, 6))
    y = ops.relu(ops.normalize_groups(ops.convolution(x, w, *CONVOLUTION), (2, 3), 1, 2, 1e-5) * scale)
    z = ops.convolution(y, v, *CONVOLUTION)
    trace.phase = "gradient"
    dw = differentiate(trace, {z: dy}, [w], set())[w]
    names = check(trace, [x, w, v, scale, dy], [z, dw])
    for name in ("normalize_groups", "normalize_groups_gradient"):
        step = next(step for step in trace.steps if step.op.name == name)
        assert (step.attributes["axes"], step.attributes["axis"]) == ((1, 2), 3)
    assert names.count("transpose") == 3  # x, dy and z


def test_one_channel_or_one_pixel_needs_no_transpose() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 1, 6, 6)), feed(trace, (4, 1, 6, 6))
    y = ops.convolution(x, w, (1, 1), (1, 1), (0, 0, 0, 0), 1)
    assert check(trace, [x, w], [y]) == ["reshape", "convolution", "reshape"]


def test_gradients_of_weights_keep_the_layout_of_weights() -> None:
    trace = Trace()
    x, dy = feed(trace, (2, 3, 6, 6)), feed(trace, (2, 4, 6, 6))
    dw = ops.convolution_weight_gradient(
        x, dy, shape=(4, 3, 3, 3), strides=(1, 1), dilations=(1, 1), padding=(1, 1, 1, 1), groups=1
    )
    names = check(trace, [x, dy], [dw])
    assert names[-1] == "convolution_weight_gradient"
    assert trace.steps[-1].results == (dw,)


def test_updates_are_left_alone() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 3, 6, 6)), feed(trace, (4, 3, 3, 3), "parameter")
    y = ops.convolution(x, w, *CONVOLUTION)
    trace.phase = "update"
    ops.assign(w, w * 0.5)
    apply(channels_last, trace, [y])
    update = [step for step in trace.steps if step.phase == "update"]
    assert [step.op.name for step in update] == ["multiply", "assign"]
    assert all(value.shape == (4, 3, 3, 3) for step in update for value in step.results)


def test_moving_pixels_and_channels_stays_inside() -> None:
    trace = Trace()
    x, v, w = feed(trace, (2, 3, 6, 6)), feed(trace, (4, 3, 3, 3)), feed(trace, (5, 8, 3, 3))
    y = ops.convolution(x, v, *CONVOLUTION)
    larger = ops.take(ops.take(y, trace.constant(np.arange(12) // 2), 2), trace.constant(np.arange(12) // 2), 3)
    cut = ops.slice_(larger, (0, 0, 3, 3), (2, 4, 9, 9))
    padded = ops.pad(ops.slice_(larger, (0, 0, 0, 2), (2, 4, 4, 6)), (0, 0, 1, 1), (0, 0, 1, 1), 0.0)
    both = ops.concatenate([cut, padded], 1)
    z = ops.convolution(both, w, *CONVOLUTION)
    names = check(trace, [x, v, w], [z])
    assert names.count("transpose") == 2, "one for the source, one for the result"


def test_a_concatenation_of_mostly_other_images_stays_outside() -> None:
    trace = Trace()
    x, v, other = feed(trace, (2, 3, 6, 6)), feed(trace, (4, 3, 3, 3)), feed(trace, (2, 20, 6, 6))
    both = ops.concatenate([ops.convolution(x, v, *CONVOLUTION), other], 1)
    check(trace, [x, v, other], [both])
    assert trace.steps[-1].op.name == "concatenate"


def test_pools_outside_all_regions_stay_channels_first() -> None:
    """They read every pixel once: moving the pixels would take longer."""
    trace = Trace()
    x, w = feed(trace, (2, 3, 6, 6)), feed(trace, (4, 3, 3, 3))
    pool = ((2, 2), (2, 2), (1, 1), (0, 0, 0, 0))
    y = ops.max_pool(x, *pool)
    z = ops.convolution(y, w, *CONVOLUTION)
    d = ops.max_pool_gradient(y, x, *pool)
    names = check(trace, [x, w], [z, d])
    assert names.count("transpose") == 2, "one for the convolution's source, one for its result"
    assert [s.op.name for s in trace.steps if s.attributes.get("channels_last")] == ["convolution"]


def test_volumes() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 3, 4, 5, 6)), feed(trace, (4, 3, 3, 3, 3))
    y = ops.relu(ops.convolution(x, w, (1, 1, 1), (1, 1, 1), (1,) * 6, 1))
    z = ops.sum_(y, (0, 2, 3, 4))
    names = check(trace, [x, w], [z])
    assert names[:5] == ["transpose", "copy", "convolution", "relu", "sum"]
    assert trace.steps[0].attributes["axes"] == (0, 2, 3, 4, 1)


def test_sequences_stay_inside_between_convolutions() -> None:
    """A convolution of sequences is one of images of height 1; what lies between two of them needs no transpose."""
    trace = Trace()
    x, v, w = feed(trace, (2, 3, 9)), feed(trace, (4, 3, 1, 3)), feed(trace, (5, 2, 1, 3))
    window = ((1, 1), (1, 1), (0, 0, 1, 1), 1)
    y = ops.reshape(ops.convolution(ops.reshape(x, (2, 3, 1, 9)), v, *window), (2, 4, 9))
    gated = ops.tanh(ops.slice_(y, (0, 0, 0), (2, 2, 9))) * ops.sigmoid(ops.slice_(y, (0, 2, 0), (2, 4, 9)))
    padded = ops.pad(gated, (0, 0, 2), (0, 0, 0), 0.0)
    z = ops.convolution(ops.reshape(padded, (2, 2, 1, 11)), w, *window)
    mean = ops.sum_(ops.reshape(z, (2, 5, 11)), (2,))
    names = check(trace, [x, v, w], [mean])
    assert names.count("transpose") == names.count("copy") == 1, "for the source"


def test_a_reshape_of_pixels_alone_stays_inside() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 3, 6, 6)), feed(trace, (4, 3, 3, 3))
    pixels = ops.reshape(ops.convolution(x, w, *CONVOLUTION), (2, 4, 36))
    tokens = ops.transpose(pixels, (0, 2, 1))  # as they lie
    names = check(trace, [x, w], [tokens])
    assert names == ["transpose", "copy", "convolution", "reshape", "reshape"]
    trace = Trace()
    x, w = feed(trace, (2, 3, 6, 6)), feed(trace, (4, 3, 3, 3))
    groups = ops.reshape(ops.convolution(x, w, *CONVOLUTION), (2, 2, 72))  # mixes channels and pixels
    assert check(trace, [x, w], [groups]) == ["transpose", "copy", "convolution", "transpose", "reshape"]


def test_a_transpose_to_images_is_undone() -> None:
    """Of tokens that become an image again: the convolution and the sum read them as they lie."""
    trace = Trace()
    tokens, v, w = feed(trace, (2, 6, 5, 4)), feed(trace, (3, 4, 3, 3)), feed(trace, (4, 3, 3, 3))
    image = ops.transpose(tokens, (0, 3, 1, 2))
    y = ops.convolution(ops.convolution(image, v, *CONVOLUTION), w, *CONVOLUTION) + image
    names = check(trace, [tokens, v, w], [y])
    assert names == ["transpose", "convolution", "convolution", "add", "transpose"], "the first is for nobody"
    trace = Trace()
    tokens, v = feed(trace, (2, 6, 5, 8)), feed(trace, (3, 4, 3, 3))
    cut = ops.transpose(ops.slice_(tokens, (0, 0, 0, 0), (2, 6, 5, 4)), (0, 3, 1, 2))  # with gaps: made dense
    assert check(trace, [tokens, v], [ops.convolution(cut, v, *CONVOLUTION)]).count("copy") == 1
