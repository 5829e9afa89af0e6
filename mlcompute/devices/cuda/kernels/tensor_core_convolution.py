"""Convolutions by tensor cores, and gradients of their inputs, for images that lie channels-last and small problems.

The gradient of a convolution's input is a convolution of the gradient, between whose pixels there are zeros if there
were strides, with the kernel's places taken backwards and its input and output channels swapped:

    y[n, i, j, o] = sum over u, v, c of x[n, i strides + u dilations - padding, ..., c] w[o, c, u, v]
    dx[n, i, j, c] = sum over u, v, o of dy[n, i + u dilations - padding', ..., o] w[o, c, kh - 1 - u, kw - 1 - v]

cuDNN's engines want weights in another order than ours, and are made for problems that fill a GPU many times over. Here
a block has some rows of an image: it brings what they are computed from, and its weights as they lie, into shared
memory; each of its warps has 16 pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.devices.cuda.codegen.tensor_cores import PADDING, tensor_core_text
from mlcompute.devices.cuda.codegen.types import DType, is_factor, memory_type, stored
from mlcompute.devices.cuda.kernels.convolution_ending import Ending
from mlcompute.devices.cuda.kernels.launch import Launch
from mlcompute.devices.loop_nest import Operands
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.op import Shape, Step

#: Weights, and multiplications and additions, from which cuDNN is faster.
_MOST_WEIGHTS, _MOST_FLOPS = 32 * 32 * 9, 1.5e9
#: Blocks that should be at work.
_BLOCKS = 128
_MOST_WARPS = 8
_MOST_SHARED = 100 << 10


@dataclass(frozen=True)
class Tiling:
    """How the work is cut.

    outputs, channels   results, and terms of their sums, that a block has at a time
    lines               of results
    columns             of a line: a multiple of 8
    image               (rows, columns) of the image that they need
    pitch               floats from the weights of one output channel to the next
    """

    outputs: int
    channels: int
    lines: int
    columns: int
    image: tuple[int, int]
    pitch: int
    rows: int

    @property
    def warps(self) -> int:
        return -(-self.lines * self.columns // 16)

    @property
    def image_floats(self) -> int:
        return self.image[0] * self.image[1] * (self.channels + PADDING)

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.image_floats + self.rows * self.pitch)


@dataclass(frozen=True)
class Form:
    """What is computed, as a convolution: of (n, h, w, c) to (n, h, w, o).

    spacing       from one pixel of the source to the next, with zeros between them
    is_gradient   that of the input
    """

    source: Shape
    result: Shape
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    padding: tuple[int, int]
    spacing: tuple[int, int]
    is_gradient: bool
    dtype: DType

    @classmethod
    def of(cls, step: Step) -> Form | None:
        """None where the kernel here is not for a step."""
        a, values = step.attributes, (*step.inputs, *step.results)
        if step.op.name == "convolution_weight_gradient" or not a.get("channels_last") or a["groups"] != 1:
            return None
        dtype = values[0].dtype
        if not is_factor(dtype) or any(value.dtype != dtype or value.size == 0 for value in values):
            return None
        is_gradient = step.op.name == "convolution_input_gradient"
        _, _, height, width = step.inputs[1].shape
        (dy, dx), (top, _, left, _) = a["dilations"], a["padding"]
        if is_gradient:
            top, left = (height - 1) * dy - top, (width - 1) * dx - left
        source, result = step.inputs[0].shape, step.results[0].shape
        strides, spacing = ((1, 1), a["strides"]) if is_gradient else (a["strides"], (1, 1))
        kernel, padding = (height, width), (top, left)
        return cls(source, result, kernel, strides, (dy, dx), padding, spacing, is_gradient, dtype)

    @property
    def flops(self) -> float:
        n, height, width, outputs = self.result
        return 2.0 * n * height * width * outputs * self.source[3] * self.kernel[0] * self.kernel[1]

    def tiling(self) -> Tiling | None:
        """The largest tiles of which there are enough to fill a GPU; None where there are none that fit."""
        channels, (n, down, _, outputs) = self.source[3], self.result
        weights = channels * outputs * self.kernel[0] * self.kernel[1]
        if channels % 8 or outputs % 8 or weights > _MOST_WEIGHTS or self.flops > _MOST_FLOPS:
            return None
        if self.kernel == self.strides == self.spacing == (1, 1):
            return None  # a product of matrices: cuDNN is good at these
        found: Tiling | None = None
        for width in dict.fromkeys((min(32, outputs), min(16, outputs))):
            for lines in range(min(down, 128), 0, -1):
                tiling = self._tiling(width, min(32, channels), lines) or self._tiling(width, min(16, channels), lines)
                if tiling is None or (found is not None and lines * tiling.columns < 64):
                    continue
                found = tiling
                if n * -(-down // lines) * -(-outputs // width) >= _BLOCKS:
                    return found
        return found

    def _tiling(self, outputs: int, channels: int, lines: int) -> Tiling | None:
        (height, width), (sy, sx), (dy, dx) = self.kernel, self.strides, self.dilations
        columns = -(-self.result[2] // 8) * 8
        image = ((lines - 1) * sy + (height - 1) * dy + 1, (columns - 1) * sx + (width - 1) * dx + 1)
        rows, run = (channels, outputs) if self.is_gradient else (outputs, channels)
        run *= height * width
        # Neighbouring rows begin in neighbouring banks: reading along rows and across them, lanes seldom meet.
        tiling = Tiling(outputs, channels, lines, columns, image, run + (1 - run) % 32, rows)
        return tiling if tiling.warps <= _MOST_WARPS and tiling.shared_bytes <= _MOST_SHARED else None


def convolution_tiling(step: Step) -> tuple[Form, Tiling] | None:
    """What a step computes and how it is cut; None where the kernel here is not for it."""
    form = Form.of(step)
    tiling = None if form is None else form.tiling()
    return None if form is None or tiling is None else (form, tiling)


def tensor_core_launches(
    step: Step, operands: Operands, form: Form, tiling: Tiling, ending: Ending | None = None
) -> Sequence[Launch]:
    """A convolution, with what is done to its results, or the gradient of its input.

    All operands are dense and 16-byte aligned.
    """
    arguments = [operands[value] for value in (*step.inputs, *step.results)]
    arguments += [] if ending is None else [ending.bias]
    n, down, _, outputs = form.result
    grid = (n * -(-down // tiling.lines), -(-outputs // tiling.outputs), 1)
    block = (32 * tiling.warps, 1, 1)
    name = "tensor core convolution"
    return [Launch(step, name, _source(form, tiling, ending), arguments, [2], grid, block, tiling.shared_bytes)]


def _source(f: Form, t: Tiling, ending: Ending | None) -> str:
    (_, image_height, image_width, channels), (_, down, across, outputs) = f.source, f.result
    (height, width), (sy, sx), (dy, dx), (top, left) = f.kernel, f.strides, f.dilations, f.padding
    apart_y, apart_x = f.spacing
    places = height * width
    # Of the weights (o, c, places): which are rows in shared memory, and how the sums go through them.
    if f.is_gradient:
        first_row, first_run, rows, runs = "first_c", "first_o", channels, outputs
        by_output, by_channel, place = places, t.pitch, f"{places - 1} - (u * KW + v)"
    else:
        first_row, first_run, rows, runs = "first_o", "first_c", outputs, channels
        by_output, by_channel, place = t.pitch, places, "u * KW + v"
    element, results = memory_type(f.dtype), ["sum[o][2 * half]", "sum[o][2 * half + 1]"]
    parameters = f"const {element}* x, const {element}* w, {element}* y"
    if ending is not None:
        parameters += ", const float* bias"
        results = [ending.result(each, f"first_o + 8 * o + 2 * t + {k}") for k, each in enumerate(results)]
    results = [stored(f.dtype, each) for each in results]
    run = (t.outputs if f.is_gradient else t.channels) * places
    return f"""{tensor_core_text(exact=not matmul_precision.allows_tf32)}
const int C = {channels}, H = {image_height}, W = {image_width}, O = {outputs}, OH = {down}, OW = {across};
const int KH = {height}, KW = {width}, SY = {sy}, SX = {sx}, DY = {dy}, DX = {dx}, TOP = {top}, LEFT = {left};
const int OUTPUTS = {t.outputs}, CHANNELS = {t.channels}, LINES = {t.lines}, COLUMNS = {t.columns};
const int APART_Y = {apart_y}, APART_X = {apart_x};
const int HEIGHT = {t.image[0]}, WIDTH = {t.image[1]}, PIXEL = CHANNELS + {PADDING};
const int ROWS = {rows}, RUNS = {runs * places}, TILE_ROWS = {t.rows}, RUN = {run}, PITCH = {t.pitch};
const int BY_OUTPUT = {by_output}, BY_CHANNEL = {by_channel};
const int THREADS = {32 * t.warps}, LINE_TILES = (OH + LINES - 1) / LINES, GROUPS = LINES * COLUMNS / 8;

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL({parameters}) {{
    extern __shared__ __align__(16) float shared[];
    float *xs = shared, *ws = shared + {t.image_floats};
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int n = blockIdx.x / LINE_TILES, line = blockIdx.x % LINE_TILES * LINES, first_o = blockIdx.y * OUTPUTS;
    // The warp's pixels are two groups of 8 neighbours; of an odd number the last has no partner.
    const int group = 2 * warp, other = min(group + 1, GROUPS - 1);
    const int at[2] = {{
        (group * 8 / COLUMNS * SY * WIDTH + (group * 8 % COLUMNS + g) * SX) * PIXEL + t,
        (other * 8 / COLUMNS * SY * WIDTH + (other * 8 % COLUMNS + g) * SX) * PIXEL + t}};
    float sum[OUTPUTS / 8][4] = {{}};
    for (int first_c = 0; first_c < C; first_c += CHANNELS) {{
        if (first_c) __syncthreads();
        #pragma unroll 8
        for (int k = threadIdx.x; k < HEIGHT * WIDTH * (CHANNELS / 4); k += THREADS) {{
            const int c = k % (CHANNELS / 4) * 4, pixel = k / (CHANNELS / 4);
            const int s = pixel % WIDTH - LEFT, r = line * SY - TOP + pixel / WIDTH;
            const bool inside = r >= 0 && r < H * APART_Y && s >= 0 && s < W * APART_X && first_c + c < C;
            const float4 some = four_inside(
                x, (((long long)n * H + r / APART_Y) * W + s / APART_X) * C + first_c + c,
                inside && r % APART_Y == 0 && s % APART_X == 0);
            *(float4*)(xs + pixel * PIXEL + c) =
                make_float4(rounded(some.x), rounded(some.y), rounded(some.z), rounded(some.w));
        }}
        #pragma unroll 8
        for (int k = threadIdx.x; k < TILE_ROWS * (RUN / 4); k += THREADS) {{
            const int row = k / (RUN / 4), from = {first_run} * (KH * KW) + k % (RUN / 4) * 4;
            const float4 some = four_inside(
                w, (long long)({first_row} + row) * RUNS + from, {first_row} + row < ROWS && from < RUNS);
            float* to = ws + row * PITCH + k % (RUN / 4) * 4;
            to[0] = rounded(some.x);
            to[1] = rounded(some.y);
            to[2] = rounded(some.z);
            to[3] = rounded(some.w);
        }}
        __syncthreads();
        for (int u = 0; u < KH; ++u)
            #pragma unroll
            for (int v = 0; v < KW; ++v) {{
                const float* p = xs + (u * DY * WIDTH + v * DX) * PIXEL;
                const float* q = ws + g * BY_OUTPUT + t * BY_CHANNEL + {place};
                #pragma unroll
                for (int c = 0; c < CHANNELS; c += 8) {{
                    float some[4] = {{p[at[0] + c], p[at[1] + c], p[at[0] + c + 4], p[at[1] + c + 4]}};
                    Left left(some);
                    #pragma unroll
                    for (int o = 0; o < OUTPUTS / 8; ++o) {{
                        const float* b = q + 8 * o * BY_OUTPUT + c * BY_CHANNEL;
                        float right[2] = {{b[0], b[4 * BY_CHANNEL]}};
                        accumulate(sum[o], left, right);
                    }}
                }}
            }}
    }}
    #pragma unroll
    for (int half = 0; half < 2; ++half) {{
        const int own = group + half, i = line + own * 8 / COLUMNS, j = own * 8 % COLUMNS + g;
        if (own >= GROUPS || i >= OH || j >= OW) continue;
        {element}* to = y + (((long long)n * OH + i) * OW + j) * O + first_o + 2 * t;
        #pragma unroll
        for (int o = 0; o < OUTPUTS / 8; ++o)
            if (first_o + 8 * o < O)
                *(Pack<{element}, 2>*)(to + 8 * o) = Pack<{element}, 2>{{{", ".join(results)}}};
    }}
}}
"""
