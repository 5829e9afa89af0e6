"""Single layers beside PyTorch's: forward and gradient pass, taking turns in one process.

python -m benchmarks.layers            all of them
python -m benchmarks.layers volume     those with that word in their names
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import mlcompute as mlc
from benchmarks.printing import readers_may_leave

#: Milliseconds of a turn: threads that wait for the other library's next call by spinning have gone to sleep by then.
THREADS, TURNS, TURN = 2, 15, 40

Shape = tuple[int, ...]
#: name, source, our layer, PyTorch's
Row = tuple[str, Shape, Callable[[Any, Any], Any], Callable[[Any], Any]]


def _weights(*shape: int) -> torch.Tensor:
    return (0.1 * torch.randn(shape)).requires_grad_()


class _GroupedAttention(torch.nn.Module):
    """Causal attention whose queries share keys and values in groups; rotary positions."""

    def __init__(self, width: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.heads, self.size = (heads, key_value_heads, key_value_heads), width // heads
        self.projections = torch.nn.ModuleList(torch.nn.Linear(width, count * self.size) for count in self.heads)
        self.output = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, self.size, 2) / self.size)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k, v = (
            projection(x).view(n, length, count, self.size).transpose(1, 2)
            for projection, count in zip(self.projections, self.heads, strict=True)
        )
        q, k = (y * cos + torch.cat([-y[..., self.size // 2 :], y[..., : self.size // 2]], -1) * sin for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(y.transpose(1, 2).reshape(n, length, width))


def rows() -> list[Row]:
    """What is measured."""
    one, three, up = _weights(64, 64, 5), _weights(32, 32, 3, 3, 3), _weights(32, 16, 2, 2, 2)
    slopes = torch.full((64,), 0.25, requires_grad=True)
    scale = torch.ones(512, requires_grad=True)
    gru, rnn = (kind(64, 128, batch_first=True) for kind in (torch.nn.GRU, torch.nn.RNN))
    grouped = _GroupedAttention(256, 8, 2)
    spelled, lengths = torch.randint(1, 30, (32, 20)), (torch.full((32,), 100), torch.full((32,), 20))
    targets = mlc.Tensor(shape=(32, 20), data=spelled.numpy(), data_type=mlc.DataType.INT64)
    return [
        ("silu", (64, 64, 32, 32), lambda g, x: g.activation(x, "silu"), F.silu),
        ("mish", (64, 64, 32, 32), lambda g, x: g.activation(x, "mish"), F.mish),
        (
            "prelu per channel",
            (64, 64, 32, 32),
            lambda g, x: g.prelu(x, per_channel=True),
            lambda x: F.prelu(x, slopes),
        ),
        (
            "convolution of sequences",
            (32, 64, 512),
            lambda g, x: g.convolution(x, 64, 5, biases=False),
            lambda x: F.conv1d(x, one, padding=2),
        ),
        (
            "convolution of volumes",
            (4, 32, 16, 32, 32),
            lambda g, x: g.convolution(x, 32, 3, biases=False),
            lambda x: F.conv3d(x, three, padding=1),
        ),
        (
            "transposed convolution of volumes",
            (4, 32, 8, 16, 16),
            lambda g, x: g.convolution(x, 16, 2, stride=2, transposed=True, biases=False),
            lambda x: F.conv_transpose3d(x, up, stride=2),
        ),
        ("max pool of sequences", (32, 64, 1024), lambda g, x: g.pool(x, 2), lambda x: F.max_pool1d(x, 2)),
        ("max pool of volumes", (4, 32, 16, 32, 32), lambda g, x: g.pool(x, 2), lambda x: F.max_pool3d(x, 2)),
        (
            "average pool of volumes",
            (4, 32, 16, 32, 32),
            lambda g, x: g.pool(x, 2, kind="average"),
            lambda x: F.avg_pool3d(x, 2),
        ),
        ("pixel shuffle", (16, 64, 64, 64), lambda g, x: g.pixel_shuffle(x, 2), lambda x: F.pixel_shuffle(x, 2)),
        ("sort", (64, 4096), lambda g, x: g.sort(x)[0], lambda x: x.sort(-1).values),
        ("sort short rows", (8192, 16), lambda g, x: g.sort(x)[0], lambda x: x.sort(-1).values),
        ("top 50 of a vocabulary", (16, 50257), lambda g, x: g.top_k(x, 50)[0], lambda x: x.topk(50).values),
        ("cumulative sum of rows", (256, 4096), lambda g, x: g.cumulative_sum(x), lambda x: x.cumsum(-1)),
        (
            "cumulative sum of columns",
            (32, 512, 64),
            lambda g, x: g.cumulative_sum(x, dimension=1),
            lambda x: x.cumsum(1),
        ),
        (
            "cosine similarity",
            (4096, 512),
            lambda g, x: g.cosine_similarity(x, g.multiply(x, x)),
            lambda x: F.cosine_similarity(x, x * x),
        ),
        ("rms normalization", (4096, 512), lambda g, x: g.normalize(x, "rms"), lambda x: F.rms_norm(x, (512,), scale)),
        ("gru", (32, 50, 64), lambda g, x: g.gru(x, 128), lambda x: gru(x)[0]),
        ("simple recurrent layer", (32, 50, 64), lambda g, x: g.rnn(x, 128), lambda x: rnn(x)[0]),
        (
            "grouped attention, rotary, causal",
            (8, 256, 256),
            lambda g, x: g.attention(x, heads=8, key_value_heads=2, causal=True, rotary=True),
            grouped,
        ),
        (
            "ctc loss",
            (32, 100, 30),
            lambda g, x: g.ctc_loss(x, targets, reduction="none"),
            lambda x: F.ctc_loss(x.log_softmax(-1).transpose(0, 1), spelled, *lengths, reduction="none"),
        ),
        ("random normal", (256, 4096), lambda g, x: g.add(x, g.random_normal(x)), lambda x: x + torch.randn_like(x)),
    ]


def ours(row: Row) -> Callable[[], None]:
    """A call that runs our layer forward and backward; it leaves the result and the gradients of source and weights."""
    _, shape, build, _ = row
    graph = mlc.TrainingGraph()
    x = graph.input(shape, "x")
    y = build(graph, x)
    user, device = graph.allocate_user_gradient(y), mlc.Device.cpu()
    graph.add_inputs({"x": x})
    graph.compile(options=mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS, device=device)
    learned = [parameter.tensor for layer in graph.layers for parameter in layer.parameters.values()]
    gradients = {f"gradient {number}": graph.gradient_tensor(tensor) for number, tensor in enumerate([x, *learned])}
    graph.add_outputs({"y": y, **gradients})
    random = np.random.default_rng(0)
    data, dy = (random.standard_normal(tensor.descriptor.shape, np.float32) for tensor in (x, user))
    graph.bind_and_write_data({"dy": dy}, for_inputs={"dy": user}, to=device)
    return lambda: graph.execute({"x": data}, options=mlc.ExecutionOptions.SYNCHRONOUS)


def theirs(row: Row) -> Callable[[], None]:
    """The same in PyTorch."""
    _, shape, _, function = row
    x = torch.randn(shape, requires_grad=True)
    dy = torch.randn_like(function(x))

    def run() -> None:
        x.grad = None
        function(x).backward(dy)

    return run


def main(words: list[str]) -> None:
    """Print a line per layer: the least milliseconds of both, and how many times as long PyTorch takes."""
    torch.set_num_threads(THREADS)
    mlc.Platform.set_thread_count(THREADS)
    print(f"{'forward and gradient pass, ms':36} {'ours':>8} {'PyTorch':>8} {'times':>6}")
    for row in rows():
        if not all(word in row[0] for word in words):
            continue
        calls = (ours(row), theirs(row))
        least = [float("inf")] * 2
        for _ in range(TURNS):
            for which, call in enumerate(calls):
                end = time.perf_counter() + 1e-3 * TURN
                while (start := time.perf_counter()) < end:
                    call()
                    least[which] = min(least[which], 1e3 * (time.perf_counter() - start))
        a, b = least
        print(f"{row[0]:36} {a:8.2f} {b:8.2f} {b / a:6.2f}")


if __name__ == "__main__":
    with readers_may_leave():
        main(sys.argv[1:])
