"""The workloads in PyTorch: eager with fused Adam, the same with channels-last images, and torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.contenders import Job
from benchmarks.workloads import (
    BETA1,
    BETA2,
    EPSILON,
    GROUPS,
    HEAD_WIDTH,
    HEADS,
    HIDDEN,
    LEARNING_RATE,
    NORM_EPSILON,
    Workload,
    blocks,
    bottleneck_stride,
    bottlenecks,
    layer_count,
)  # fmt: skip


def mlp(workload: Workload) -> nn.Module:
    sizes = [workload.input_shape[1], *(shape[0] for shape in workload.shapes.values() if len(shape) == 2)]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet(workload: Workload) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def normalized(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs, NORM_EPSILON))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = normalized(inputs, outputs, 3, stride), normalized(outputs, outputs, 3, 1)
        changes = stride > 1 or inputs != outputs
        self.shortcut = normalized(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        shapes = workload.shapes
        width, _, kernel, _ = shapes["stem.weight"]
        stem = [normalized(3, width, kernel, 2 if kernel == 7 else 1), nn.ReLU()]
        if kernel == 7:
            stem.append(nn.MaxPool2d(3, 2, 1))
        found = [(*shapes[f"{at}.conv0.weight"][:2], stride) for at, stride in blocks(shapes)]
        self.body = nn.Sequential(*stem, *(Block(inputs, outputs, stride) for outputs, inputs, stride in found))
        self.head = nn.Linear(found[-1][0], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(workload.input_shape[2], HIDDEN, batch_first=True), nn.Linear(HIDDEN, 10)
        # PyTorch's cell has two biases that are added; everybody else has one.
        nn.init.zeros_(self.lstm.bias_hh_l0.requires_grad_(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        vocabulary, d = workload.shapes["embedding"]
        count = layer_count(workload.shapes)
        self.embedding = nn.Embedding(vocabulary, d)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, HEADS, 4 * d, 0.0, layer_norm_eps=NORM_EPSILON, batch_first=True,
                                       norm_first=True)
            for _ in range(count)
        )  # fmt: skip
        self.head = nn.Linear(d, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, inside: int, outputs: int, stride: int, changes: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            normalized(inputs, inside, 1, 1), nn.ReLU(),
            normalized(inside, inside, 3, stride), nn.ReLU(),
            normalized(inside, outputs, 1, 1),
        )  # fmt: skip
        self.shortcut = normalized(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        shapes = workload.shapes
        width = shapes["stem.weight"][0]
        blocks = []
        for at, stage, index in bottlenecks(shapes):
            inside, inputs = shapes[f"{at}.conv0.weight"][:2]
            outputs = shapes[f"{at}.conv2.weight"][0]
            blocks.append(Bottleneck(inputs, inside, outputs, bottleneck_stride(stage, index), index == 0))
        self.body = nn.Sequential(normalized(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks)
        self.head = nn.Linear(outputs, workload.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class DecoderLayer(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm0, self.qkv, self.out = nn.LayerNorm(d, NORM_EPSILON), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm1, self.up, self.down = nn.LayerNorm(d, NORM_EPSILON), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, d = x.shape
        parts = self.qkv(self.norm0(x)).view(n, length, 3, -1, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(n, length, d))
        return x + self.down(F.gelu(self.up(self.norm1(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        d = workload.shapes["embedding"][1]
        self.embedding = nn.Embedding(*workload.shapes["embedding"])
        self.positions = nn.Embedding(*workload.shapes["positions"])
        self.layers = nn.Sequential(*(DecoderLayer(d) for _ in range(layer_count(workload.shapes))))
        self.norm = nn.LayerNorm(d, NORM_EPSILON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers(self.embedding(x) + self.positions.weight))
        return F.linear(x, self.embedding.weight)  # the head shares the weights of the embedding


class StackedRecurrent(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.lstm = nn.LSTM(workload.input_shape[2], HIDDEN, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, 10)
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("bias_hh"):
                nn.init.zeros_(parameter.requires_grad_(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0].mean(1))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, NORM_EPSILON)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(h), approximate="tanh")).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        width = workload.shapes["stem.weight"][0]
        self.stem = nn.Conv2d(3, width, 2, 2)
        count = layer_count(workload.shapes, "depthwise.weight")
        self.blocks, self.head = nn.Sequential(*(ConvNeXtBlock(width) for _ in range(count))), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class DilatedLayer(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilated, self.out = nn.Conv1d(width, 2 * width, 2, dilation=dilation), nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        filtered, gate = self.dilated(F.pad(x, (self.dilated.dilation[0], 0))).chunk(2, 1)
        return self.out(filtered.tanh() * gate.sigmoid())


class WaveNet(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        width, count = workload.shapes["stem.weight"][0], layer_count(workload.shapes, "dilated.weight")
        self.stem = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(DilatedLayer(width, 2**index) for index in range(count))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.stem(x), []
        for layer in self.layers:
            skips.append(layer(x))
            x = x + skips[-1]
        return self.head(torch.stack(skips).sum(0).relu().mean(2))


class ImageNetwork(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.kinds, channels, kept = [layer.kind for layer in workload.layers], workload.input_shape[1], []
        self.body = nn.ModuleList()
        for kind, _, outputs, stride in workload.layers:
            match kind:
                case "convolution":
                    made = nn.Conv2d(channels, outputs, 3, stride, 1)
                case "dilated":
                    made = nn.Conv2d(channels, outputs, 3, 1, stride, dilation=stride)
                case "pointwise":
                    made = nn.Conv2d(channels, outputs, 1)
                case "depthwise":
                    made = nn.Conv2d(channels, outputs, 3, stride, 1, groups=channels)
                case "halving":
                    made = nn.Conv2d(channels, outputs, 4, 2, 1)
                case "transposed":
                    made = nn.ConvTranspose2d(channels, outputs, 4, 2, 1)
                case "norm":
                    made = nn.BatchNorm2d(channels, NORM_EPSILON)
                case "groupnorm":
                    made = nn.GroupNorm(GROUPS, channels, NORM_EPSILON)
                case "dense":
                    made = nn.Linear(channels, outputs)
                case _:
                    plain = {"relu": nn.ReLU(), "silu": nn.SiLU(), "pool": nn.MaxPool2d(2)}
                    made = nn.Upsample(scale_factor=2) if kind == "upsample" else plain.get(kind, nn.Identity())
            self.body.append(made)
            if kind == "keep":
                kept.append(channels)
            channels = channels + kept.pop() if kind == "concatenate" else outputs or channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for kind, layer in zip(self.kinds, self.body, strict=True):
            if kind == "keep":
                kept.append(x)
            elif kind == "concatenate":
                x = torch.cat([kept.pop(), x], 1)
            else:
                x = x.mean((2, 3)) if kind == "mean" else layer(x)
        return x


MODELS: dict[str, Callable[[Workload], nn.Module]] = {
    "mlp": mlp,
    "lenet": lenet,
    "resnet": ResNet,
    "lstm": Recurrent,
    "transformer": Transformer,
    "resnet50": ResNet50,
    "gpt2": GPT2,
    "stacked_lstm": StackedRecurrent,
    "convnext": ConvNeXt,
    "wavenet": WaveNet,
    "image_network": ImageNetwork,
}


def initialized(workload: Workload) -> tuple[nn.Module, list[nn.Parameter]]:
    """The model with the workload's weights; those that are trained."""
    model = MODELS[workload.model](workload)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter, array in zip(parameters, workload.weights().values(), strict=True):
            assert parameter.shape == array.shape
            parameter.copy_(torch.from_numpy(array))
    return model, parameters


def build(workload: Workload, mode: str, variant: str = "") -> Job:
    """variant: "", "channels_last", "compile" or "bf16" (autocast)."""
    model: Any
    model, parameters = initialized(workload)
    inputs, classes = workload.batch()
    x, y = torch.from_numpy(inputs), torch.from_numpy(classes)
    if variant == "channels_last" and x.dim() == 4:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    forward = torch.compile(model) if variant == "compile" else _narrowed(model) if variant == "bf16" else model
    results: list[Any] = [None]

    def infer() -> None:
        with torch.inference_mode():
            results[0] = forward(x)

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        scores = forward(x)
        loss = F.mse_loss(scores, y) if workload.target else F.cross_entropy(scores.flatten(0, -2), y.reshape(-1))
        loss.backward()
        optimizer.step()
        results[0] = loss.detach()

    def result() -> np.ndarray:
        return results[0].numpy()

    if mode == "infer":
        model.eval()
        return Job(infer, result)
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True)
    # Eager steps are forward, gradient and update one by one already, with every gradient readable.
    return Job(train, result, lambda: {"bytes_live": live_bytes(train, optimizer)})


def _narrowed(model: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Products in bfloat16, the loss in float32."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(x)
        return scores.float()

    return forward


def live_bytes(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> float:
    """Most bytes of tensors alive during a step, beyond parameters and data: results, gradients, optimizer state."""
    optimizer.zero_grad(set_to_none=True)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        step()
    now = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    states = (
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    )
    return float(most + sum(value.numel() * value.element_size() for value in states))
