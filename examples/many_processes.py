"""Train handwritten digits in four processes, and in one: the same bits.

python examples/many_processes.py                    starts both, and compares what they learned
mlcompute launch -n 4 examples/many_processes.py --work FILE    what each of the processes runs
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from images import load
from safetensors.numpy import load_file, save_file

import mlcompute as mlc


def work(path: str, epochs: int) -> None:
    """What every process runs. Alone it is a group of one."""
    group = mlc.Group.world()
    images = load(None)
    mlc.Platform.set_rng_seed_to(1)
    graph = mlc.Graph()
    x = graph.input((64, *images.train.shape[1:]), "image")
    x = graph.pool(graph.convolution(x, 8, kernel=3, activation="relu"))
    graph.dense(graph.flatten(x), images.class_count)
    trainer = mlc.Trainer(
        graph, loss="softmax_cross_entropy", learning_rate=0.01, metrics=["accuracy"], group=group
    )
    history = trainer.fit(images.train, images.train_classes, epochs=epochs)
    if group.is_first:
        print(f"{group.size} processes: accuracy {history.epochs[-1]['accuracy']:.4f}", flush=True)
        weights = trainer.copy_weights()
        save_file({str(number): array for number, array in enumerate(weights)}, path)


def main(processes: int = 4, epochs: int = 5) -> None:
    with tempfile.TemporaryDirectory() as folder:
        learned = []
        for count in (processes, 1):
            path = str(Path(folder) / f"{count}.safetensors")
            words = [__file__, "--work", path, "--epochs", str(epochs)]
            launch = ["-m", "mlcompute", "launch", "-n", str(count)] if count > 1 else []
            subprocess.run([sys.executable, *launch, *words], check=True)
            learned.append(load_file(path))
    several, one = learned
    assert all(np.array_equal(several[name], one[name]) for name in one)
    print(f"{processes} processes learned what one did, bit for bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", default="")
    parser.add_argument("--epochs", type=int, default=5)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.epochs)
    else:
        main(epochs=given.epochs)
