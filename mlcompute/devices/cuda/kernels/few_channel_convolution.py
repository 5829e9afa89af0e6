"""Convolutions of images with few channels, channels-last: the first layer of a network, where cuDNN is slow.

Neighbouring threads have neighbouring output channels. A thread has a strip of neighbouring pixels of one row: what it
reads of the image serves several of them, and is the same for all threads beside it. Forward, it keeps its weights in
registers; for the gradient of the weights, their sums. Blocks then have slices of the pixels, whose sums are added in
order.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cuda.codegen.indexing import BLOCK, NARROW
from mlcompute.devices.cuda.codegen.types import DOUBLE, FLOAT, is_floating, loaded, memory_type, stored
from mlcompute.devices.cuda.kernels.column_sums import column_sums
from mlcompute.devices.cuda.kernels.convolution_ending import Ending
from mlcompute.devices.cuda.kernels.direct_convolution import NAMES, Problem, kernel_text, numbers
from mlcompute.devices.cuda.kernels.launch import Argument, Launch
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Step

#: Input channels; weights per output channel, and pixels of a row, that a thread has registers for.
_MOST_CHANNELS, _MOST_WEIGHTS, _MOST_PIXELS = 4, 49, 40
#: Neighbouring results of a thread: what leaves the fewest of them empty.
_STRIPS = (16, 14, 12, 10, 8, 7, 6, 5, 4)
#: Blocks that should be at work.
_BLOCKS = 264
#: Weights whose sums the threads of a block exchange at a time.
_EXCHANGED = 8


def has_few_channels(step: Step) -> bool:
    """Is it a convolution, or the gradient of its weights, that the kernels here are for?"""
    a, forward = step.attributes, step.op.name == "convolution"
    values = (*step.inputs, *step.results)
    if not a.get("channels_last") or a["groups"] != 1 or step.op.name == "convolution_input_gradient":
        return False
    if not all(is_floating(value.dtype) and value.dtype != DOUBLE and value.size < NARROW for value in values):
        return False
    _, channels, height, width = step.inputs[1].shape if forward else a["shape"]
    results = step.results[0].shape if forward else step.inputs[1].shape
    if channels > _MOST_CHANNELS or channels * height * width > _MOST_WEIGHTS:
        return False
    return _strip(results[2], width, a["strides"][1], a["dilations"][1]) > 0


def few_channel_launches(step: Step, operands: Operands, ending: Ending | None = None) -> Sequence[Launch]:
    """A convolution, with what is done to its results, or the gradient of its weights."""
    p = Problem.of(step, operands)
    n, _, height, width = p.y.shape
    strip, lanes = _strip(width, p.w.shape[3], p.strides[1], p.dilations[1]), _lanes(p.y.shape[1])
    strips, slots = n * height * -(-width // strip), BLOCK // lanes
    chunks = -(-p.y.shape[1] // lanes)
    if step.op.name == "convolution":
        blocks = max(1, min(-(-strips // slots), -(-8 * _BLOCKS // chunks)))
        arguments: list[Argument] = [p.x, p.w, p.y, *numbers(p), *([] if ending is None else [ending.bias])]
        source = _forward_source(p, strip, lanes, ending)
        grid = (blocks, chunks, 1)
        return [Launch(step, "few channel convolution", source, arguments, [2], grid, (BLOCK, 1, 1))]
    slices = _slices(step)
    planned = operands.workspace(step, 0, slices * p.w.size * 4)
    parts = Operand(planned.base, planned.offset // 4, (slices, p.w.size), (p.w.size, 1), FLOAT)
    arguments = [p.x, p.y, *numbers(p), parts]
    source, grid = _gradient_source(p, strip, lanes), (slices, chunks, 1)
    written = [len(arguments) - 1]
    launch = Launch(step, "few channel convolution", source, arguments, written, grid, (BLOCK, 1, 1))
    assert p.w.is_dense
    return [launch, column_sums(step, parts, p.w, groups=p.w.size // p.w.shape[0])]


def few_channel_workspace(step: Step) -> int:
    """Bytes for the sums of slices."""
    return _slices(step) * step.results[0].size * 4 if step.op.name == "convolution_weight_gradient" else 0


def _slices(step: Step) -> int:
    """Parts of the pixels of a weight gradient."""
    n, height, width, channels = step.inputs[1].shape
    a, lanes = step.attributes, _lanes(channels)
    strips = n * height * -(-width // _strip(width, a["shape"][3], a["strides"][1], a["dilations"][1]))
    most = -(-_BLOCKS // -(-channels // lanes))
    return max(1, min(most, strips * lanes // (2 * BLOCK)))


def _strip(columns: int, width: int, stride: int, dilation: int) -> int:
    """Results of a thread, for rows of so many; 0 where a thread has too few registers for what they need."""
    fitting = [strip for strip in _STRIPS if _row_length(strip, width, stride, dilation) <= _MOST_PIXELS]
    return min(fitting, key=lambda strip: -(-columns // strip) * strip, default=0)


def _lanes(channels: int) -> int:
    """Threads with neighbouring output channels."""
    return min(32, 1 << (channels - 1).bit_length())


def _row_length(strip: int, width: int, stride: int, dilation: int) -> int:
    """Pixels of a row of the image that a strip of results is computed from."""
    return (strip - 1) * stride + (width - 1) * dilation + 1


# Text -----------------------------------------------------------------------------------------------------------------


def _constants(p: Problem, strip: int, lanes: int) -> str:
    _, channels, _, width = p.w.shape
    row = _row_length(strip, width, p.strides[1], p.dilations[1])
    sizes = f"CHANNELS = {channels}, STRIP = {strip}, ROW = {row}, LANES = {lanes}, SLOTS = {BLOCK // lanes}"
    return f"""    const int {sizes};
    const int WEIGHTS = CHANNELS * KH * KW, STRIPS = (OW + STRIP - 1) / STRIP, total = N * OH * STRIPS;
    const int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES, o = blockIdx.y * LANES + lane;
"""


#: Where the strip is: sample n, row i, columns from `from`; and the loop over what it is computed from.
_PLACE = """
        const int from = strip % STRIPS * STRIP, line = strip / STRIPS, i = line % OH, n = line / OH;
        const int first = from * SX - left;"""


def _rows(p: Problem, body: str) -> str:
    """A loop over the rows and channels of the image under a strip, with its pixels in `row`."""
    return f"""
        #pragma unroll
        for (int u = 0; u < KH; ++u) {{
            const int r = i * SY + u * DY - top;
            if (r < 0 || r >= H) continue;
            #pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {{
                const Index at = n * x0 + c * x1 + r * x2;
                float row[ROW];
                #pragma unroll
                for (int k = 0; k < ROW; ++k) {{  // without a branch: loads would wait for each other
                    const int s = first + k;
                    const float pixel = {loaded(p.x.dtype, "x[at + min(max(s, 0), W - 1) * x3]")};
                    row[k] = s >= 0 && s < W ? pixel : 0.0f;
                }}
                #pragma unroll
                for (int v = 0; v < KW; ++v)
                    #pragma unroll
                    for (int k = 0; k < STRIP; ++k) {body}
            }}
        }}"""


def _forward_source(p: Problem, strip: int, lanes: int, ending: Ending | None) -> str:
    result = "sum[k]" if ending is None else ending.result("sum[k]", "o")
    product = "sum[k] += row[k * SX + v * DX] * weight[(c * KH + u) * KW + v];"
    body = f"""{_constants(p, strip, lanes)}
    __shared__ float staged[WEIGHTS][LANES + 1];  // one more: threads that store neighbours use all banks
    for (int at = threadIdx.x; at < WEIGHTS * LANES; at += {BLOCK}) {{
        const int place = at % WEIGHTS, own = blockIdx.y * LANES + at / WEIGHTS;
        const int v = place % KW, u = place / KW % KH, c = place / (KW * KH);
        if (own < O) staged[place][at / WEIGHTS] = {loaded(p.w.dtype, "w[own * w0 + c * w1 + u * w2 + v * w3]")};
    }}
    __syncthreads();
    if (o >= O) return;
    float weight[WEIGHTS];
    #pragma unroll
    for (int place = 0; place < WEIGHTS; ++place) weight[place] = staged[place][lane];
    for (int strip = blockIdx.x * SLOTS + slot; strip < total; strip += gridDim.x * SLOTS) {{{_PLACE}
        float sum[STRIP] = {{}};{_rows(p, product)}
        #pragma unroll
        for (int k = 0; k < STRIP; ++k)
            if (from + k < OW) y[n * y0 + o * y1 + i * y2 + (from + k) * y3] = {stored(p.y.dtype, result)};
    }}
"""
    index, memory = "long long" if p.is_wide else "int", memory_type(p.x.dtype)
    names = ", ".join(f"{index} {name}" for name in NAMES)
    pointers = f"const {memory}* x, const {memory}* w, {memory}* y"
    return kernel_text(p, "y", body, BLOCK, f"{pointers}, {names}{'' if ending is None else ', const float* bias'}")


def _gradient_source(p: Problem, strip: int, lanes: int) -> str:
    product = "sum[(c * KH + u) * KW + v] += row[k * SX + v * DX] * d[k];"
    gradient = loaded(p.y.dtype, "y[n * y0 + o * y1 + i * y2 + min(from + k, OW - 1) * y3]")
    body = f"""{_constants(p, strip, lanes)}
    const int EXCHANGED = {_EXCHANGED}, length = (total + gridDim.x - 1) / gridDim.x;
    const int end = min((int)(blockIdx.x + 1) * length, total);
    float sum[WEIGHTS] = {{}};
    for (int strip = blockIdx.x * length + slot; strip < end && o < O; strip += SLOTS) {{{_PLACE}
        float d[STRIP];
        #pragma unroll
        for (int k = 0; k < STRIP; ++k) {{
            const float own = {gradient};
            d[k] = from + k < OW ? own : 0.0f;
        }}{_rows(p, product)}
    }}
    __shared__ float exchanged[EXCHANGED][SLOTS][LANES];
    #pragma unroll
    for (int begin = 0; begin < WEIGHTS; begin += EXCHANGED) {{
        #pragma unroll
        for (int k = 0; k < EXCHANGED; ++k)
            if (begin + k < WEIGHTS) exchanged[k][slot][lane] = sum[begin + k];
        __syncthreads();
        for (int at = threadIdx.x; at < EXCHANGED * LANES; at += {BLOCK}) {{
            const int k = at / LANES, own = blockIdx.y * LANES + at % LANES;
            if (own < O && begin + k < WEIGHTS) {{
                float all = exchanged[k][0][at % LANES];
                for (int other = 1; other < SLOTS; ++other) all += exchanged[k][other][at % LANES];
                parts[((Index)blockIdx.x * WEIGHTS + begin + k) * O + own] = all;
            }}
        }}
        __syncthreads();
    }}
"""
    index, memory = "long long" if p.is_wide else "int", memory_type(p.x.dtype)
    names = ", ".join(f"{index} {name}" for name in NAMES)
    return kernel_text(p, "", body, BLOCK, f"const {memory}* x, const {memory}* y, {names}, float* parts")
