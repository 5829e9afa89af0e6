"""Networks in PyTorch, exported to ONNX by its own exporter: what a user brings."""

from __future__ import annotations

import io
import logging
import math
import warnings
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional


def export(module: nn.Module, *inputs: Tensor, open_batch: bool = True) -> onnx.ModelProto:
    """A module as a model with inputs x0, x1, .. and output y; the batch is a symbol, or the number of the inputs."""
    file = io.BytesIO()
    names = [f"x{number}" for number in range(len(inputs))]
    axes = {name: {0: "batch"} for name in (*names, "y")} if open_batch else None
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter warns of its own deprecation and of tracing
            torch.onnx.export(
                module.eval(), inputs, file, dynamo=False, input_names=names, output_names=["y"], dynamic_axes=axes
            )
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load_from_string(file.getvalue())


class RootMeanSquare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class RotaryAttention(nn.Module):
    """Attention with a causal mask of infinities, a scale in a buffer, and rotary tables or frequencies."""

    def __init__(self, width: int, heads: int, length: int, tables: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.heads, self.tables = heads, tables
        self.register_buffer("scale", torch.tensor([1 / math.sqrt(width // heads)]))
        self.register_buffer("mask", torch.triu(torch.full((length, length), float("-inf")), 1))
        frequencies = 1.0 / (10000 ** (torch.arange(0, width // heads, 2) / (width // heads)))
        angles = torch.outer(torch.arange(length).float(), frequencies)
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("c", angles.cos())  # names that say nothing: the numbers do
        self.register_buffer("s", angles.sin())
        self.register_buffer("f", frequencies)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = (f(x).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.tables:
            cos, sin = self.c[:t], self.s[:t]
        else:
            angles = torch.arange(t, dtype=torch.float32)[:, None] * self.f[None]
            angles = torch.cat([angles, angles], -1)
            cos, sin = angles.cos(), angles.sin()

        def rotated(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin

        scores = rotated(q) @ rotated(k).transpose(-1, -2) * self.scale + self.mask[:t, :t]
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, width))


class Llama(nn.Module):
    """Two blocks of RMS normalization, rotary attention and a gated product."""

    def __init__(self, tables: bool = True, width: int = 16, length: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.layers = nn.ModuleList()
        for _ in range(2):
            linear = [nn.Linear(a, b, bias=False) for a, b in ((width, 32), (width, 32), (32, width))]
            attention = RotaryAttention(width, 2, length, tables)
            self.layers.append(nn.ModuleList([RootMeanSquare(width), attention, RootMeanSquare(width), *linear]))
        self.norm, self.head = RootMeanSquare(width), nn.Linear(width, 20, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            first, attention, second, gate, up, down = layer  # type: ignore[misc]
            x = x + attention(first(x))
            y = second(x)
            x = x + down(functional.silu(gate(y)) * up(y))
        return self.head(self.norm(x))


class VisionTransformer(nn.Module):
    """A class token of zeros, positions, a layer scale, and the mean and deviation of the images in buffers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.start = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.layer_scale = nn.Parameter(torch.full((width,), 1e-4))
        layer = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)
        self.register_buffer("mu", torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1))
        self.register_buffer("sigma", torch.tensor([0.2, 0.2, 0.3]).view(1, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch((x - self.mu) / self.sigma).flatten(2).transpose(1, 2)
        x = torch.cat([self.start.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.layer_scale * self.encoder(x)[:, 0])


class SineAttention(nn.Module):
    """Positions as interleaved sines and cosines, added to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        table, step = torch.zeros(8, 16), torch.arange(8.0)[:, None]
        frequencies = torch.exp(torch.arange(0, 16, 2.0) * (-math.log(10000.0) / 16))
        table[:, 0::2], table[:, 1::2] = torch.sin(step * frequencies), torch.cos(step * frequencies)
        self.register_buffer("t", table[None])
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x) + self.t[:, : x.shape[1]])


class Spectrogram(nn.Module):
    """A Fourier basis with a window as a convolution, a bank of filters as a product, then a network."""

    def __init__(self, n: int = 64, apart: bool = False) -> None:
        super().__init__()
        angles = torch.arange(n // 2 + 1.0)[:, None] * torch.arange(n)[None] * 2 * math.pi / n
        real, imaginary = (part * torch.hann_window(n) for part in (angles.cos(), -angles.sin()))
        self.apart = apart
        if apart:
            self.register_buffer("r", real[:, None])
            self.register_buffer("i", imaginary[:, None])
        else:
            self.register_buffer("k", torch.cat([real, imaginary])[:, None])
        bank = torch.zeros(n // 2 + 1, 10)
        for column in range(10):
            bank[3 * column : 3 * column + 4, column] = torch.tensor([0.2, 1.0, 0.7, 0.1])
        self.register_buffer("bank", bank)
        self.conv, self.head = nn.Conv1d(10, 8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.apart:
            real, imaginary = (functional.conv1d(x, part, stride=32) for part in (self.r, self.i))
        else:
            both = functional.conv1d(x, self.k, stride=32)
            real, imaginary = both.chunk(2, 1)
        power = (real**2 + imaginary**2).transpose(1, 2) @ self.bank
        return self.head(self.conv(torch.log(power + 1e-3).transpose(1, 2)).mean(-1))


class Detector(nn.Module):
    """A head with anchors, strides, and the fixed convolution that takes the mean of a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 66, 3, padding=1)
        self.mean = nn.Conv2d(16, 1, 1, bias=False)
        self.mean.weight.data = torch.arange(16.0).view(1, 16, 1, 1)
        self.mean.weight.requires_grad = False
        grid = torch.meshgrid(torch.arange(4.0) + 0.5, torch.arange(4.0) + 0.5, indexing="xy")
        self.register_buffer("places", torch.stack(grid).reshape(1, 2, 16))
        self.register_buffer("steps", torch.tensor([8.0] * 8 + [16.0] * 8)[None])

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(2)
        n = y.shape[0]
        sides = self.mean(y[:, :64].reshape(n, 4, 16, 16).transpose(1, 2).softmax(1)).view(n, 4, 16)
        centres = (self.places + (sides[:, 2:] - sides[:, :2]) / 2) * self.steps
        return torch.cat([centres, y[:, 64:].sigmoid()], 1)


class Waves(nn.Module):
    """A network whose activation is the sine."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.sin(30 * self.a(x)))


class Shared(nn.Module):
    """One linear layer and one normalization used twice, fresh."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        nn.init.zeros_(self.a.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(self.norm(self.a(x)))))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.head = kind(6, 8, 2, batch_first=True, bidirectional=True), nn.Linear(16, 3)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


class Windows(nn.Module):
    """Attention within windows of an image: samples and windows share an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        y = self.f(x.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c))
        y = (y @ y.transpose(1, 2)).softmax(-1) @ y
        return y.view(n, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)


def ids() -> Tensor:
    return torch.arange(32).reshape(4, 8) % 20


#: Name -> the network and what it takes.
NETWORKS: dict[str, Any] = {
    "rotary tables": lambda: (Llama(), ids()),
    "rotary frequencies": lambda: (Llama(tables=False), ids()),
    "vision transformer": lambda: (VisionTransformer(), torch.randn(4, 3, 8, 8)),
    "sine positions": lambda: (SineAttention(), ids()),
    "spectrogram": lambda: (Spectrogram(), torch.randn(4, 1, 256)),
    "spectrogram apart": lambda: (Spectrogram(apart=True), torch.randn(4, 1, 256)),
    "detector": lambda: (Detector(), torch.randn(4, 3, 4, 4)),
    "lstm": lambda: (Recurrent(nn.LSTM), torch.randn(4, 5, 6)),
    "gru": lambda: (Recurrent(nn.GRU), torch.randn(4, 5, 6)),
    "sine activation": lambda: (Waves(), torch.randn(4, 2)),
    "shared modules": lambda: (Shared(), torch.randn(4, 4)),
    "windows": lambda: (Windows(), torch.randn(4, 4, 4, 8)),
}
