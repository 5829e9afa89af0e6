"""Images and arrays: layouts, scaling, folders, augmentation as a function of seed, epoch and number."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.cli import main
from mlcompute.data import augmenting, image_folder

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def photos() -> dict[str, np.ndarray]:
    """Colour images in a folder per class."""
    image = pytest.importorskip("PIL.Image", reason="images need mlcompute[images]")
    found = {}
    for kind in ("cat", "dog"):
        Path("photos", kind).mkdir(parents=True)
        for k in range(10):
            pixels = RNG.integers(0, 256, (8, 6, 3)).astype(np.uint8)
            found[f"photos/{kind}/{k}.png"] = pixels
            image.fromarray(pixels).save(f"photos/{kind}/{k}.png")
    Path("photos/cat/.DS_Store").touch()
    Path("photos/cat/read.me").touch()
    return found


def test_layouts_of_arrays() -> None:
    y = np.arange(20) % 4
    grey = RNG.integers(0, 256, (20, 5, 6)).astype(np.uint8)
    data = mlc.data.arrays(grey, y, validation=0.0)
    assert data.shape == (1, 5, 6)
    np.testing.assert_allclose(data.x[:, 0], grey / 255, rtol=1e-6)
    last = RNG.random((20, 5, 6, 3))
    np.testing.assert_array_equal(mlc.data.arrays(last, y, validation=0.0).x, last.transpose(0, 3, 1, 2))
    first = last.transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(mlc.data.arrays(first, y, validation=0.0).x, first)
    table = RNG.normal(3, 2, (20, 4))
    np.testing.assert_allclose(
        mlc.data.arrays(table, y, validation=0.0).x, (table - table.mean(0)) / table.std(0), rtol=1e-5
    )
    assert mlc.data.arrays(RNG.random((20, 5, 6)), y).shape == (5, 6), "a sequence, unless it is said"
    assert mlc.data.arrays(RNG.random((20, 5, 6)), y, images=True).shape == (1, 5, 6)
    notes = str(mlc.data.arrays(last, y))
    assert "images with channels last, fed with channels first, (3, 5, 6) each" in notes


def test_names_of_what_global_pooling_predicts() -> None:
    """(n, classes, 1, 1): the classes are on axis 1, and not on the last one."""
    digits = mlc.data.digits()
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    x = graph.convolution(digits.input(graph, 32), 16, kernel=3, activation="relu")
    graph.dense(graph.global_pool(x), digits.outputs)
    trainer = mlc.Trainer(graph, loss=digits.loss, metrics=digits.metrics, learning_rate=0.01)
    trainer.fit(digits, epochs=2, verbose=0)
    scores = trainer.predict(digits.validation)
    assert scores.shape[1:] == (10, 1, 1)
    prepared = digits.preprocessing
    assert prepared is not None
    expected = [str(one) for one in scores[:, :, 0, 0].argmax(axis=1)]
    assert prepared.decode(scores).tolist() == expected
    assert len(set(expected)) > 1
    evaluation = mlc.Evaluation.of(trainer, digits.validation)
    assert evaluation is not None
    assert evaluation.accuracy == pytest.approx(trainer.evaluate(digits.validation)["accuracy"])
    trainer.save("digits.safetensors")
    np.savez("some.npz", x=digits.validation.x[:9])
    for output in ("all.csv", "all.npy"):
        options = ["--classes"] if output == "all.npy" else []
        assert main(["predict", "digits.safetensors", "some.npz", "--output", output, *options]) == 0
    rows = Path("all.csv").read_text().splitlines()
    assert rows[0] == "sample,prediction,probability"
    assert [row.split(",")[1] for row in rows[1:]] == expected[:9]
    assert [str(one) for one in np.load("all.npy")] == expected[:9]
    with pytest.raises(mlc.DataError, match=r"(?s)predictions of shape \(9, 1\) for 10 classes.*10 outputs"):
        prepared.decode(scores[:9, :1, 0, 0])
    two = mlc.data.arrays(np.zeros((8, 3)), np.array(["no", "yes"] * 4)).preprocessing
    assert two is not None
    with pytest.raises(mlc.DataError, match=r"np\.array\(prepared\.classes\)\[\(logits\[:, 0\] > 0\)"):
        two.decode(np.zeros((8, 1)))


def test_labels_of_arrays() -> None:
    x = RNG.normal(size=(12, 3))
    words = mlc.data.arrays(x, np.array(["dog", "cat", "owl"] * 4), validation=0.0)
    assert words.classes == ("cat", "dog", "owl")
    assert words.y[:3].tolist() == [1, 0, 2]
    signs = mlc.data.arrays(x, np.array([-1, 1] * 6), validation=0.0)
    assert (signs.classes, signs.y[:2].tolist()) == (("-1", "1"), [0, 1])
    one_hot = mlc.data.arrays(x, np.eye(3)[np.arange(12) % 3], validation=0.0)
    assert one_hot.y.tolist() == (np.arange(12) % 3).tolist()
    numbers = mlc.data.arrays(x, x[:, :2] * 10, validation=0.0)
    assert (numbers.outputs, numbers.loss, numbers.y.shape) == (2, "mse", (12, 2))
    assert mlc.data.arrays(x, np.arange(12), task="regression").outputs == 1


def test_npz_as_keras_writes_it() -> None:
    x, y = RNG.integers(0, 256, (30, 4, 4)).astype(np.uint8), np.arange(30) % 3
    np.savez("mnist.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:])
    data = mlc.data.load("mnist.npz")
    assert (len(data), len(data.validation or ()), data.test) == (20, 10, None)
    np.savez("three.npz", x=x[:20], y=y[:20], x_val=x[20:25], y_val=y[20:25], x_test=x[25:], y_test=y[25:])
    data = mlc.data.load("three.npz")
    assert (len(data), len(data.validation or ()), len(data.test or ())) == (20, 5, 5)


def test_arrays_with_validation_samples_of_their_own() -> None:
    x, y = RNG.normal(size=(30, 3)), np.arange(30) % 3
    data = mlc.data.arrays(x[:20], y[:20], validation=(x[20:], y[20:]), test=np.float32(0.25))
    assert (len(data), len(data.validation or ()), len(data.test or ())) == (15, 10, 5)
    np.testing.assert_allclose(data.x.mean(axis=0), 0, atol=1e-6, err_msg="of what is learned from")
    np.savez("val.npz", x=x[:20], y=y[:20], x_val=x[20:], y_val=y[20:])
    found = mlc.data.load("val.npz", test=0.25)
    assert (len(found), len(found.validation or ()), len(found.test or ())) == (15, 10, 5)
    assert mlc.data.arrays(x, y, validation=np.float32(0.2)).preprocessing.split.validation == float(np.float32(0.2))
    with pytest.raises(mlc.DataError, match=r"samples of shape \(2,\), the model was trained with \(3,\)"):
        mlc.data.arrays(x, y, validation=(x[:, :2], y))


def test_npz_as_others_write_it() -> None:
    x, y = RNG.normal(size=(20, 3)), np.arange(20) % 2
    np.savez("x.npz", X_train=x, y_train=y, X_test=x[:5], y_test=y[:5])
    data = mlc.data.load("x.npz")
    assert (len(data), len(data.validation or ())) == (20, 5)
    np.savez("x.npz", X=x, x=x, y=y)
    with pytest.raises(mlc.DataError, match="holds x_train more than once"):
        mlc.data.load("x.npz")
    np.savez("x.npz", x=x * 1e300, y=y)
    with pytest.raises(mlc.DataError, match="too large to be standardised"):
        mlc.data.load("x.npz")
    Path("x.npz").write_text("no arrays")
    with pytest.raises(mlc.DataError, match=r"x.npz: is no .npz or .npy file"):
        mlc.data.load("x.npz")


def test_idx_files() -> None:
    x, y = RNG.integers(0, 256, (30, 4, 4)).astype(np.uint8), (np.arange(30) % 3).astype(np.uint8)
    Path("mnist").mkdir()
    for kind, array in (("images-idx3", x), ("labels-idx1", y)):
        head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        Path(f"mnist/train-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    data = mlc.data.load("mnist", validation=0.0)
    np.testing.assert_allclose(data.x[:, 0], x / 255, rtol=1e-6)
    np.testing.assert_array_equal(data.y, y)
    with pytest.raises(mlc.DataError, match="there is no file train-labels-idx1-ubyte"):
        Path("mnist/train-labels-idx1-ubyte.gz").unlink()
        mlc.data.load("mnist")


def test_a_folder_per_class(photos: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    data = mlc.data.images("photos")
    assert (len(data), data.shape, data.classes) == (16, (3, 8, 6), ("cat", "dog"))
    assert data.validation is not None
    assert np.bincount(data.validation.y).tolist() == [2, 2]
    x, y = data.batch(np.arange(16))
    for one, label, name in zip(x, y, data.sample_names, strict=True):
        np.testing.assert_allclose(one, photos[name].transpose(2, 0, 1) / 255, rtol=1e-6)
        assert data.classes[label] in name
    monkeypatch.setattr(image_folder, "MOST_BYTES", 0)
    later = mlc.data.images("photos")
    assert isinstance(later.x, image_folder.ImageFiles), "too much to keep: read batch by batch"
    np.testing.assert_array_equal(later.batch(np.arange(16))[0], x)
    with pytest.raises(mlc.DataError, match=r"size is \(1, 2, 3\)"):
        mlc.data.images("photos", size=(1, 2, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="size must be a whole number, not 'small'"):
        mlc.data.images("photos", size="small")  # type: ignore[arg-type]
    small = mlc.data.images("photos", size=(4, 4), grey=True)
    assert small.shape == (1, 4, 4)
    Path("photos").rename("train")
    Path("all/val/cat").mkdir(parents=True)
    Path("train/cat/0.png").rename("all/val/cat/0.png")
    Path("train").rename("all/train")
    divided = mlc.data.images("all")
    assert (len(divided), len(divided.validation or ())) == (19, 1)


def test_what_lies_in_real_folders(photos: dict[str, np.ndarray]) -> None:
    from PIL import Image

    Path("photos/cat/._0.png").write_bytes(b"\0\5\x16\7")
    for folder in ("photos/cat/.thumbnails", "photos/cat/__MACOSX", "photos/.git"):
        Path(folder).mkdir()
        Path(folder, "0.png").write_bytes(b"no image")
    Path("photos/dog/phone.heic").touch()
    Path("photos/cat/kittens/more").mkdir(parents=True)
    Path("photos/cat/0.png").rename("photos/cat/kittens/more/0.png")
    data = mlc.data.images("photos")
    assert (len(data) + len(data.validation or ()), data.classes) == (20, ("cat", "dog"))
    assert data.notes[-1] == "not read: 1 .heic, 1 .me"
    preprocessing = data.preprocessing
    assert preprocessing is not None
    assert np.bincount(preprocessing.read("photos").y).tolist() == [10, 10], "kittens are cats"
    assert preprocessing.read("photos/dog").y.tolist() == [1] * 10
    Path("top").mkdir()
    Path("photos").rename("top/photos")
    with pytest.raises(mlc.DataError) as refused:
        mlc.data.images("top")
    assert "give top/photos: it has cat, dog" in refused.value.fix
    Path("top/photos/Test").mkdir()
    Path("top/photos/Train").mkdir()
    Path("top/photos/cat").rename("top/photos/Train/cat")
    Path("top/photos/dog").rename("top/photos/Train/dog")
    for kind in ("cat", "dog"):
        Path("top/photos/Test", kind).mkdir()
        Path("top/photos/Train", kind, "1.png").rename(f"top/photos/Test/{kind}/1.png")
    divided = mlc.data.images("top/photos")
    assert (len(divided), len(divided.validation or ()), divided.classes) == (18, 2, ("cat", "dog"))
    assert divided.preprocessing is not None
    assert len(divided.preprocessing.read("top/photos")) == 2, "evaluate measures what was held out"
    assert len(divided.preprocessing.read("top/photos", labels=False)) == 20, "predict answers for all"
    for pixels in (np.full((8, 6), 0.5, np.float32), np.full((8, 6), 200, np.int32)):
        Image.fromarray(pixels).save("top/photos/Train/cat/x.tif")
        with pytest.raises(mlc.DataError, match="nothing says which is white"):
            mlc.data.images("top/photos")


def graph_for(data: mlc.data.Dataset) -> mlc.Trainer:
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    graph.dense(graph.flatten(data.input(graph, 6)), data.outputs)
    return mlc.Trainer(graph, loss=data.loss, metrics=data.metrics, learning_rate=1e-2)


def test_training_from_files_is_the_same(photos: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = mlc.data.images("photos").augmented(flip=True, crop=1)
    whole = graph_for(kept).fit(kept, epochs=4, verbose=0)["val_loss"]
    monkeypatch.setattr(image_folder, "MOST_BYTES", 0)
    read = mlc.data.images("photos").augmented(flip=True, crop=1)
    trainer = graph_for(read)
    assert trainer.fit(read, epochs=2, verbose=0)["val_loss"] == whole[:2]
    trainer.save("two.safetensors")
    again = graph_for(read)
    assert again.fit(read, epochs=4, verbose=0, resume="two.safetensors")["val_loss"] == whole, "the same bits"
    preprocessing = mlc.data.preprocessing_of("two.safetensors")
    assert preprocessing is not None
    weighed = graph_for(read).fit(read, epochs=1, verbose=0, class_weight="balanced")
    assert weighed["val_loss"] == whole[:1], "as many cats as dogs"
    named = preprocessing.decode(again.predict(preprocessing.read("photos/cat", labels=False)))
    assert set(named) <= {"cat", "dog"}
    assert len(named) == 10


def test_augmentation_is_a_function_of_seed_epoch_and_number() -> None:
    data = mlc.data.digits().augmented(flip=True, crop=2, rotate=20, colour=0.3, mixup=0.4)
    x, y = data.batch(np.arange(30), epoch=2)
    alone = [data.batch([k], epoch=2) for k in (29, 3)]
    for k, (one, label) in zip((29, 3), alone, strict=True):
        np.testing.assert_array_equal(one[0], x[k])
        np.testing.assert_array_equal(label[0], y[k])
    np.testing.assert_allclose(y.sum(axis=1), 1, rtol=1e-6)
    assert (x.min() >= 0, x.max() <= 1) == (True, True)
    assert not np.array_equal(x, data.batch(np.arange(30), epoch=3)[0])
    other = mlc.data.digits().augmented(flip=True, crop=2, rotate=20, colour=0.3, mixup=0.4, seed=1)
    assert not np.array_equal(x, other.batch(np.arange(30), epoch=2)[0])
    assert data.validation is not None
    assert data.validation.augment is None
    history = graph_for(data).fit(data, epochs=1, steps_per_epoch=5, verbose=0)
    assert np.isfinite(history["loss"][0])


def test_changes_of_images() -> None:
    x = RNG.random((3, 2, 5, 5)).astype(np.float32)
    quarter = augmenting._turned(x, np.full(3, np.pi / 2))
    np.testing.assert_allclose(quarter, np.rot90(x, -1, axes=(2, 3)), atol=1e-6)
    np.testing.assert_allclose(augmenting._turned(x, np.zeros(3)), x, atol=1e-6)
    same = augmenting._moved(x, 2, np.full((3, 2), 0.5))
    np.testing.assert_array_equal(same, x)
    corner = augmenting._moved(x, 1, np.zeros((3, 2)))
    np.testing.assert_array_equal(corner[:, :, 1:, 1:], x[:, :, :-1, :-1])
    np.testing.assert_allclose(augmenting._coloured(x, np.ones((3, 3))), x, atol=1e-6)
    flipped = mlc.data.Augment(flip=True)._changed(x, np.zeros((3, 8)))
    np.testing.assert_array_equal(flipped, x[..., ::-1])
    with pytest.raises(mlc.DataError, match="crop is -1"):
        mlc.data.Augment(crop=-1)
    with pytest.raises(TypeError, match="Augment: rotate must be a number, not 'much'"):
        mlc.data.Augment(rotate="much")  # type: ignore[arg-type]
    with pytest.raises(mlc.DataError, match="crop is 8, which moves images of 8 x 8 pixels out of sight"):
        mlc.data.digits().augmented(crop=8)


def test_the_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, classes = datasets.load_digits(return_X_y=True)
    data = mlc.data.digits(validation=0.0)
    np.testing.assert_array_equal(data.x.reshape(-1, 64) * 16, pixels)
    np.testing.assert_array_equal(data.y, classes)
    flowers = mlc.data.iris(validation=0.0)
    wanted = datasets.load_iris()
    np.testing.assert_array_equal(flowers.y, wanted.target)
    np.testing.assert_allclose(flowers.x * wanted.data.std(0) + wanted.data.mean(0), wanted.data, rtol=1e-4)
