"""Fine-tune a network that PyTorch trained: export it as ONNX, import, train on, export, run in onnxruntime.

PyTorch learns to read handwritten digits. Then the camera is turned by 90 degrees, and the network reads hardly any of
them; a few epochs here teach it the new view.

    pip install ".[onnx]" onnxruntime torch        # in a clone of the project
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import torch
from torch import nn

import mlcompute as mlc


def train_in_pytorch(data: mlc.data.Dataset, path: Path, epochs: int = 20) -> None:
    """A small CNN, trained as usual, exported for any number of images."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip
    images, digits = torch.tensor(data.x), torch.tensor(data.y).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), digits[rows]).backward()
            optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # dynamo=True needs the package onnxscript as well
        axes = {"image": {0: "batch"}, "scores": {0: "batch"}}
        torch.onnx.export(
            model.eval(), (images[:1],), path, dynamo=False,
            input_names=["image"], output_names=["scores"], dynamic_axes=axes,
        )  # fmt: skip


def main(epochs: int = 10) -> None:
    """Export from PyTorch, measure, fine-tune, measure again, in onnxruntime too."""
    mlc.Platform.set_rng_seed_to(0)
    data = mlc.data.digits()
    test = data.validation
    turned, turned_test = (np.rot90(images, axes=(2, 3)).copy() for images in (data.x, test.x))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.onnx"
        train_in_pytorch(data, path)
        graph = mlc.onnx.load(path, batch=64)
        trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=2e-3)
        upright = trainer.evaluate(test.x, test.y)["accuracy"]
        before = trainer.evaluate(turned_test, test.y)["accuracy"]
        trainer.fit(turned, data.y, epochs=epochs)
        after = trainer.evaluate(turned_test, test.y)["accuracy"]

        mlc.onnx.save(graph, path)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (scores,) = session.run(["scores"], {"image": turned_test})

    np.testing.assert_allclose(np.asarray(scores), trainer.predict(turned_test), rtol=1e-3, atol=1e-3)
    print(f"as PyTorch trained it: {upright:.1%} of upright digits, {before:.1%} of turned ones")
    print(f"fine-tuned: {after:.1%} of turned digits, with the same scores in onnxruntime")
    assert before < 0.5 < 0.9 < after


if __name__ == "__main__":
    main()
