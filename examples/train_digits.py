"""Train a small convolutional network on real images and see all of it: layers, memory, progress, mistakes.

python examples/train_digits.py                 handwritten digits that come with scikit-learn
python examples/train_digits.py --data FOLDER   MNIST, Fashion-MNIST or anything else in MNIST's file format
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from blocks import convolution, dense, max_pool, one_hot, parameters_of
from images import Images, load
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from safetensors.numpy import save_file

import mlcompute as mlc

BATCH, RATE = 64, 3e-3
#: How often the images are gone through follows from how many there are: about this many are seen in all.
IMAGES_SEEN = 30_000


class Network:
    """Two convolutions with pooling, two fully connected layers; trained, and asked, over one graph."""

    def __init__(self, images: Images, seed: int) -> None:
        mlc.Platform.set_rng_seed_to(seed)
        _, channels, height, width = images.train.shape
        x = self.image = mlc.Tensor(shape=(BATCH, channels, height, width))
        graph = self.graph = mlc.Graph()
        for number, wider in enumerate((16, 32), start=1):
            x = graph.node(convolution(channels, wider, f"conv{number}"), source=x)
            x = graph.node(labelled(mlc.ActivationLayer.relu(), f"relu{number}"), source=x)
            x = graph.node(max_pool(f"pool{number}"), source=x)
            channels = wider
        features = int(np.prod(x.descriptor.shape[1:]))
        x = graph.node(labelled(mlc.ReshapeLayer((BATCH, features)), "flatten"), source=x)
        x = graph.node(dense(features, 64, "fc1"), source=x)
        x = graph.node(labelled(mlc.ActivationLayer.relu(), "relu3"), source=x)
        x = graph.node(labelled(mlc.DropoutLayer(0.25, seed), "dropout"), source=x)
        graph.node(dense(64, images.class_count, "fc2"), source=x)

        self.optimizer = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=RATE))
        loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN)
        self.training = mlc.TrainingGraph([graph], loss, self.optimizer)
        self.training.add_inputs({"image": self.image}, {"class": mlc.Tensor(shape=(BATCH, images.class_count))})
        self.training.compile(device=mlc.Device())
        self.predicting = mlc.InferenceGraph([graph])  # the same weights; dropout off
        self.predicting.add_inputs({"image": self.image})
        self.predicting.compile(device=mlc.Device())

    def learn(self, images: np.ndarray, labels: np.ndarray) -> float:
        """One step on up to BATCH images; the loss."""
        return self.training.execute({"image": images}, {"class": labels}, batch_size=len(images)).result.data.item()

    def classify(self, images: np.ndarray) -> np.ndarray:
        parts = [images[start : start + BATCH] for start in range(0, len(images), BATCH)]
        runs = [self.predicting.execute({"image": part}, batch_size=len(part)).result.data for part in parts]
        return np.concatenate(runs).argmax(axis=1)


def labelled(layer: mlc.Layer, label: str) -> mlc.Layer:
    layer.label = label
    return layer


def size(count: float) -> str:
    return f"{count / 1e6:,.2f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def describe(console: Console, network: Network, images: Images) -> None:
    """What is about to run: layers, and where the memory goes."""
    training, device = network.training, network.training.device
    height, width = images.train.shape[2:]
    console.print(
        f"[bold]mlcompute {mlc.__version__}[/]  on the {device.actual_device_type.name} ({device.engine.name})"
    )
    console.print(
        f"{images.name}: {len(images.train):,} images to learn from, {len(images.test):,} to test on, "
        f"{height} x {width} pixels, {images.class_count} classes\n",
        highlight=False,
    )
    head, *rows, total = str(network.graph.summary()).splitlines()
    console.print(Text(head, style="dim"), Text("\n".join(rows)), Text(total, style="bold"), "", sep="\n")

    program = training.programs[f"fused {BATCH}"]
    made_in = {value: step.phase for step in program.steps for value in step.results}
    made_in |= {room: step.phase for step, room in program.plan.workspaces.items()}
    parts, steps = Counter(), Counter(step.phase for step in program.steps)
    for value, place in program.plan.placements.items():
        parts[made_in[value]] += place.nbytes
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("memory of a training step")
    table.add_column("size", justify="right")
    table.add_column("")
    for phase, nbytes in parts.items():
        table.add_row(f"{phase} pass", size(nbytes), f"{steps[phase]} steps")
    arena, whole = program.plan.nbytes, training.device_memory_size
    table.add_row("all three, memory reused", size(arena), f"{arena / sum(parts.values()):.0%} of the sum")
    states = len(network.optimizer.state_names)
    table.add_row("optimizer state", size(whole - arena), f"{states} numbers per parameter")
    table.add_row("device_memory_size", size(whole), "known before the first step", style="bold")
    console.print(table, "")


def train(console: Console, network: Network, images: Images, epochs: int, seed: int) -> list[float]:
    """Epoch after epoch with a falling rate; the mean loss of each."""
    labels, losses = one_hot(images.train_classes, images.class_count), []
    count = len(images.train)
    steps = -(-count // BATCH)
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=epochs * steps, epoch=1, news="")
        for epoch in range(epochs):
            network.optimizer.learning_rate = RATE * (1 - epoch / epochs)
            order = np.random.default_rng((seed, epoch)).permutation(count)
            total, start = 0.0, time.perf_counter()
            for first in range(0, count, BATCH):
                batch = order[first : first + BATCH]
                loss = network.learn(images.train[batch], labels[batch])
                total += loss * len(batch)
                progress.update(task, advance=1, epoch=epoch + 1, news=f"loss {loss:.4f}")
            rate = count / (time.perf_counter() - start)
            losses.append(total / count)
            accuracy = float((network.classify(images.test) == images.test_classes).mean())
            console.print(
                f"epoch {epoch + 1:>2}   loss {losses[-1]:.4f}   test accuracy {accuracy:.1%}   {rate:,.0f} images/s",
                highlight=False,
            )
    return losses


def picture(image: np.ndarray) -> str:
    """One line per row of pixels, two characters per pixel, in five shades."""
    return "\n".join("".join(2 * " ░▒▓█"[int(shade * 4.99)] for shade in row) for row in image[0])


def show(console: Console, images: Images, guesses: np.ndarray) -> None:
    """A few test images, mistakes first, at least one that is right."""
    wrong, right = (np.flatnonzero((guesses == images.test_classes) == is_right) for is_right in (False, True))
    every = -(-max(images.test.shape[2:]) // 10)  # of larger images only some pixels are shown
    columns = max(1, min(4, console.width // 24))
    mistakes = wrong[: columns - 1].tolist()
    table = Table(box=None, padding=(0, 4, 0, 0), show_header=False)
    cells = []
    for index in [*mistakes, *right[: columns - len(mistakes)].tolist()]:
        guess, true = guesses[index], images.test_classes[index]
        verdict = (f"{guess}, right", "green") if guess == true else (f"{guess}, but it is {true}", "red")
        cells.append(Text(picture(images.test[index, :, ::every, ::every]) + "\n").append(*verdict))
    table.add_row(*cells)
    console.print(table)


def save(network: Network, folder: Path) -> Path:
    """The weights as safetensors; the old file stays whole until the new one is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "weights.safetensors"
    arrays = {name: tensor.data for name, tensor in parameters_of(network.graph).items()}
    save_file(arrays, path.with_suffix(".new"), metadata={"made by": f"mlcompute {mlc.__version__}"})
    os.replace(path.with_suffix(".new"), path)
    return path


def main(data: str | None = None, epochs: int = 0, seed: int = 0, out: str = "runs", limit: int = 0) -> float:
    """Train, show, save; the test accuracy."""
    console = Console(soft_wrap=True)
    images = load(data)
    if limit:
        images = Images(
            images.name, images.train[:limit], images.train_classes[:limit], images.test, images.test_classes
        )
    network = Network(images, seed)
    describe(console, network, images)
    start = time.perf_counter()
    losses = train(console, network, images, epochs or max(1, round(IMAGES_SEEN / len(images.train))), seed)
    seconds = time.perf_counter() - start
    guesses = network.classify(images.test)
    accuracy = float((guesses == images.test_classes).mean())
    console.print()
    show(console, images, guesses)
    right = int((guesses == images.test_classes).sum())
    console.print(
        f"\n[bold green]{accuracy:.2%}[/] of the test images are recognised ({right} of {len(guesses)}), "
        f"after {len(losses)} epoch{'s'[: len(losses) > 1]} in {seconds:.1f} s",
        highlight=False,
    )
    path = save(network, Path(out) / images.name)
    console.print(f"weights: {path}  ({size(path.stat().st_size)})", highlight=False)
    if not (data or epochs or limit or seed):
        assert accuracy >= 0.97, f"{accuracy:.2%} of the digits were recognised, 97% was expected"
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small convolutional network on real images.")
    parser.add_argument("--data", metavar="FOLDER", help="IDX files as MNIST has them, gzipped or not")
    parser.add_argument("--epochs", type=int, default=0, help="how often to go through the images")
    parser.add_argument("--limit", type=int, default=0, help="learn from the first images only")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another run")
    parser.add_argument("--out", default="runs", metavar="FOLDER", help="where the weights go")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without block characters still gets the numbers
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit("stopped; nothing was saved")
