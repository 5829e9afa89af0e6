"""Import a trained network, give it a new head, fine-tune the head on real data, export, run in onnxruntime.

The network is a small CNN that rates the quality of speech, from the package `speechmos`. Its convolutions read a
spectrogram of any size, so they are imported for 32 x 32 pictures, and a new fully connected layer learns to read
handwritten digits (scikit-learn's) from what they see. The trained convolutions stay as they are.

    pip install mlcompute[onnx] onnxruntime scikit-learn speechmos
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
from sklearn.datasets import load_digits

import mlcompute as mlc

SIDE = 32


def pretrained() -> Path:
    """The model file inside the installed package; the package itself need not be imported."""
    spec = importlib.util.find_spec("speechmos")
    assert spec is not None, "pip install speechmos"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "dnsmos_models" / "model_v8.onnx"


def without_head(path: Path) -> tuple[onnx.ModelProto, str]:
    """The model up to the pictures its last pooling reads: the convolutions, without the old head."""
    model = onnx.load(path)
    end = next(index for index, node in enumerate(model.graph.node) if node.op_type == "ReduceMax")
    name = model.graph.node[end].input[0]
    del model.graph.node[end:]
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return model, name


def digits() -> tuple[np.ndarray, np.ndarray]:
    """All 1 797 pictures in random order, enlarged to SIDE x SIDE, and what they show."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    enlarged = np.kron(data.images[order], np.ones((SIDE // 8, SIDE // 8)))
    return enlarged.astype(np.float32), data.target[order]


def main(batch: int = 32, epochs: int = 5) -> None:
    """Fine-tune, export, compare."""
    mlc.Platform.set_rng_seed_to(0)
    print(mlc.onnx.doctor(pretrained(), batch=batch))

    model, last = without_head(pretrained())
    graph = mlc.onnx.load(model, shapes={"input_1": (batch, SIDE, SIDE)})
    x, seen = graph.inputs["input_1"], graph.outputs[last]
    width = seen.descriptor.element_count // batch
    flat = graph.reshape((batch, width), source=seen)
    head = mlc.FullyConnectedLayer(
        mlc.Tensor(shape=(10, width), random_initializer_type=mlc.RandomInitializerType.GLOROT_UNIFORM),
        mlc.Tensor(shape=(1, 10, 1, 1), fill_with_data=0.0),
        mlc.ConvolutionDescriptor(input_feature_channel_count=width, output_feature_channel_count=10),
    )
    scores = graph.node(head, source=flat)

    target = mlc.Tensor(shape=(batch, 10))
    training = mlc.TrainingGraph(
        [graph],
        mlc.LossLayer(mlc.LossDescriptor(mlc.LossType.SOFTMAX_CROSS_ENTROPY, mlc.ReductionType.MEAN)),
        mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01)),
    )
    training.stop_gradient([seen])  # only the head learns
    training.add_inputs({"input_1": x}, {"digit": target})
    training.compile(device=mlc.Device())

    pictures, labels = digits()
    hot = np.eye(10, dtype=np.float32)[labels]
    used = 40 * batch
    before = {name: np.array(tensor.data) for name, tensor in graph.weights.items()}
    losses = []
    for _ in range(epochs):
        for start in range(0, used, batch):
            rows = slice(start, start + batch)
            result = training.execute({"input_1": pictures[rows]}, {"digit": hot[rows]}).result
            assert result is not None
            assert result.data is not None
            losses.append(float(np.mean(result.data)))
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f}")
    assert all(np.array_equal(before[name], np.array(tensor.data)) for name, tensor in graph.weights.items())

    network = mlc.InferenceGraph([graph])
    network.add_inputs({"input_1": x})
    network.add_outputs({"scores": scores})
    network.compile(device=mlc.Device())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.onnx"
        mlc.onnx.save(network, path)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    right = count = 0
    for start in range(used, len(pictures) - batch, batch):
        rows = slice(start, start + batch)
        network.execute({"input_1": pictures[rows]}).wait()
        (theirs,) = session.run(["scores"], {"input_1": pictures[rows]})
        np.testing.assert_allclose(np.array(scores.data), theirs, rtol=1e-3, atol=1e-3)
        right += int(np.sum(theirs.argmax(1) == labels[rows]))
        count += batch
    print(f"in onnxruntime, with the same scores as here: {right / count:.1%} of {count} held-out digits")
    assert right / count > 0.75  # one in ten would be chance


if __name__ == "__main__":
    main()
