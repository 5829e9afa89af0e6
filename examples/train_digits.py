"""Train a small convolutional network on real images and see all of it: layers, memory, progress, mistakes.

python examples/train_digits.py                 handwritten digits that come with mlcompute
python examples/train_digits.py --data FOLDER   MNIST, Fashion-MNIST or anything else in MNIST's file format
python examples/train_digits.py --device gpu    on a GPU

Ctrl-C saves where it is and says so; --resume goes on from there, bitwise as if nothing had happened.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from images import Images, load
from rich.console import Console
from rich.table import Table
from rich.text import Text

import mlcompute as mlc

BATCH, RATE = 64, 3e-3
#: How often the images are gone through follows from how many there are: about this many are seen in all.
IMAGES_SEEN = 30_000


def network(images: Images, seed: int, device: mlc.Device) -> mlc.Trainer:
    """Two convolutions with pooling, two fully connected layers."""
    mlc.Platform.set_rng_seed_to(seed)
    graph = mlc.Graph()
    x = graph.input((BATCH, *images.train.shape[1:]), "image")
    for number, channels in enumerate((16, 32), start=1):
        x = graph.convolution(x, channels, kernel=3, activation="relu", name=f"conv{number}")
        x = graph.pool(x, name=f"pool{number}")
    x = graph.dense(graph.flatten(x, name="flatten"), 64, activation="relu", name="fc1")
    x = graph.dropout(x, 0.25, seed=seed, name="dropout")
    graph.dense(x, images.class_count, name="fc2")
    return mlc.Trainer(
        graph,
        loss="softmax_cross_entropy",
        optimizer="adam",
        learning_rate=RATE,
        metrics=["accuracy"],
        device=device,
    )


def size(count: float) -> str:
    return f"{count / 1e6:,.2f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def describe(console: Console, trainer: mlc.Trainer, images: Images) -> None:
    """What is about to run: layers, and where the memory goes."""
    training, device = trainer.training, trainer.device
    height, width = images.train.shape[2:]
    where = ", ".join(["the " + device.actual_device_type.name, *(gpu.name for gpu in device.gpu_devices)])
    console.print(f"[bold]mlcompute {mlc.__version__}[/]  on {where}")
    console.print(
        f"{images.name}: {len(images.train):,} images to learn from, {len(images.test):,} to test on, "
        f"{height} x {width} pixels, {images.class_count} classes\n",
        highlight=False,
    )
    console.print(Text(str(training.summary())), "", sep="\n")

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
    table.add_row("optimizer state", size(whole - arena), f"{len(trainer.optimizer.state_names)} numbers per parameter")
    table.add_row("device_memory_size", size(whole), "known before the first step", style="bold")
    console.print(table, "")


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


def main(
    data: str | None = None,
    epochs: int = 0,
    seed: int = 0,
    out: str = "runs",
    limit: int = 0,
    resume: str | None = None,
    device: str = "cpu",
) -> float:
    """Train, show, save; the test accuracy."""
    console = Console(soft_wrap=True)
    images = load(data)
    if limit:
        images = Images(
            images.name, images.train[:limit], images.train_classes[:limit], images.test, images.test_classes
        )
    # Where there is no GPU, this raises an error that says why.
    trainer = network(images, seed, mlc.Device(mlc.DeviceType[device.upper()]))
    describe(console, trainer, images)
    folder = Path(out) / images.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "weights.safetensors"
    trainer.resume_hint = f"python {sys.argv[0]} {' '.join(sys.argv[1:])} --resume {path}"
    start = time.perf_counter()
    history = trainer.fit(
        images.train,
        images.train_classes,
        epochs=epochs or max(1, round(IMAGES_SEEN / len(images.train))),
        shuffle_seed=seed,
        validation=(images.test, images.test_classes),
        callbacks=[
            mlc.callbacks.LearningRateScheduler(mlc.schedules.Cosine()),
            mlc.callbacks.GradientWatch(every=20),
            mlc.callbacks.TerminateOnNaN(),
            mlc.callbacks.ModelCheckpoint(path),
        ],
        resume=resume,
    )
    seconds = time.perf_counter() - start
    guesses = trainer.predict(images.test).argmax(axis=1)
    accuracy = float((guesses == images.test_classes).mean())
    console.print()
    show(console, images, guesses)
    right, count = int((guesses == images.test_classes).sum()), len(history.epochs)
    console.print(
        f"\n[bold green]{accuracy:.2%}[/] of the test images are recognised ({right} of {len(guesses)}), "
        f"after {count} epoch{'s'[: count > 1]} in {seconds:.1f} s",
        highlight=False,
    )
    labels = images.train_classes[:BATCH]
    profile = None
    if len(images.train) >= BATCH:
        profile = trainer.training.profile({"image": images.train[:BATCH]}, {"labels": labels})
    evaluation = mlc.Evaluation.of(trainer, images.test, images.test_classes)
    title = f"CNN on {images.name}"
    report = mlc.report(folder / "report.html", trainer.training, history, profile, title=title, evaluation=evaluation)
    console.print(f"checkpoint: {path}  ({size(path.stat().st_size)})", highlight=False)
    console.print(f"report:     {report}  ({size(report.stat().st_size)})", highlight=False)
    if not (data or epochs or limit or seed):
        assert accuracy >= 0.97, f"{accuracy:.2%} of the digits were recognised, 97% was expected"
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small convolutional network on real images.")
    parser.add_argument("--data", metavar="FOLDER", help="IDX files as MNIST has them, gzipped or not")
    parser.add_argument("--epochs", type=int, default=0, help="how often to go through the images")
    parser.add_argument("--limit", type=int, default=0, help="learn from the first images only")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another run")
    parser.add_argument("--out", default="runs", metavar="FOLDER", help="where checkpoint and report go")
    parser.add_argument("--resume", metavar="FILE", help="go on from a checkpoint")
    parser.add_argument("--device", choices=("cpu", "gpu", "any"), default="cpu", help="where to train (cpu)")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without block characters still gets the numbers
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit(130)
    except mlc.DeviceError as error:
        sys.exit(str(error))
