"""What newcomers get wrong with their own data: every message says what was wrong and what to do. Nothing trains."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.cli import main

ROWS = "\n".join(f"{k % 7},{k * 0.37 % 5:.2f},{'ab'[k % 2]},{k * 1.5}" for k in range(40))
GOOD = f"age,height,colour,price\n{ROWS}\n"
IRIS = Path(mlc.data.__file__).parent / "iris.csv"

#: file name, what is in it, the rest of `mlcompute train`, what the message says.
TABLES = [
    ("houses.csv", GOOD, ["tabular"],
     ["houses.csv: which column is to be predicted?", "age, height, colour, price", "--target"]),
    ("houses.csv", GOOD, ["tabular", "--target", "prize"],
     ["there is no column 'prize'", "did you mean 'price'?", "age, height"]),
    ("houses.csv", GOOD, ["tabular", "--target", "PRICE"], ["there is no column 'PRICE'", "did you mean 'price'?"]),
    ("houses.csv", GOOD, ["tabular", "--target", "price", "--column", "agee=number"],
     ["there is no column 'agee'", "'age'?"]),
    ("houses.csv", GOOD, ["tabular", "--target", "colour", "--task", "regression"],
     ["'colour' is not made of numbers", "classification"]),
    ("houses.csv", GOOD, ["tabular", "--target", "price", "--task", "classification"],
     ["which is no class", "regression"]),
    ("houses.csv", GOOD, ["cnn", "--target", "price"], ["cnn is not for a table", "mlcompute train tabular"]),
    ("houses.csv", GOOD, ["tabular", "--target", "price", "--size", "64"], ["this is a table, and size is not for it"]),
    ("houses.csv", GOOD, ["tabular", "--target", "price", "--validation", "1.5"],
     ["1.5 of the samples for validation", "below 1"]),
    ("houses.csv", GOOD, ["tabular", "--target", "price", "--validation", "valid.csv"],
     ["valid.csv: there is no such file"]),
    ("houses.csv", GOOD, ["tabular", "--target", "price", "--augment", "flip"], ["only images are augmented"]),
    ("houses.csv", GOOD, ["lstm", "--target", "price", "--window", "60"],
     ["40 lines hold no window of 60", "shorter window"]),
    ("houses.csv", GOOD, ["lstm", "--target", "colour", "--window", "4"], ["'colour' is not made of numbers"]),
    ("alone.csv", "y\n1.5\n2.5\n", ["tabular", "--target", "y"],
     ["'y' is the only column, there is nothing to predict it from", "--window N"]),
    ("empty.csv", "", ["tabular", "--target", "y"], ["empty.csv: the file is empty", "column names"]),
    ("head.csv", "a,b,y\n", ["tabular", "--target", "y"], ["column names and no samples", "a, b, y"]),
    ("numbers.csv", "1,2,3\n4,5,6\n", ["tabular", "--target", "c3"],
     ["first line holds numbers (1, 2, 3)", "--no-header"]),
    ("ragged.csv", "a,b,y\n1,2,3\n1,2,3,4\n", ["tabular", "--target", "y"],
     ["line 3 has 4 fields, the first line 3", "quotes"]),
    ("twice.csv", "a,a,y\n1,2,3\n", ["tabular", "--target", "y"], ["two columns are called 'a'"]),
    ("typo.csv", GOOD.replace("\n3,", "\nthree,", 1), ["tabular", "--target", "price"],
     ["line 5: 'three' in column 'age' is no number, 39 others are", "--column age=category"]),
    ("infinite.csv", GOOD.replace("\n3,", "\ninf,", 1), ["tabular", "--target", "price"],
     ["line 5: column 'age' is infinite"]),
    ("holes.csv", GOOD.replace(",4.5\n", ",\n", 1), ["tabular", "--target", "price"],
     ["the target 'price' is missing in line 5", "delete their lines"]),
    ("minus.csv", "a,y\n" + "".join(f"{k * 0.5},{'+-'[k % 2]}\n" for k in range(9)), ["tabular", "--target", "y"],
     ["the target 'y' is missing in line 3 and 3 more ('-')", "if '-' is a class, give it another name"]),
    ("title.csv", f"Sales of 2026\n\n{GOOD}", ["tabular", "--target", "price"],
     ["line 3 has 4 fields, the first line 1", "delete what stands above"]),
    ("short.csv", GOOD + "1,2\n", ["tabular", "--target", "price"],
     ["line 42 has 2 fields, the first line 4", "complete the line"]),
    ("open.csv", 'a,b\n1,"x\n2,"y"\n3,z\n', ["tabular", "--target", "b"],
     ["line 2:", "double the quotation marks"]),
    ("dates.csv", "d,y\n" + "".join(f"2026-01-{k + 1:02},{k}\n" for k in range(20)) + "soon,3\n", ["tabular"],
     ["line 22: 'soon' in column 'd' is no date, 20 others are", "--column d=category"]),
    ("latin.txt", "größer ".encode("latin-1") * 40, ["gpt"], ["line 1 is not utf-8 text", "--encoding cp1252"]),
    ("latin.csv", "a,y\n1,2\n", ["tabular", "--encoding", "cp1253x"], ["there is no encoding 'cp1253x'"]),
    ("good.csv", GOOD, ["tabular", "--target", "price", "--separator", ";;"], ["separator is ';;'", "one character"]),
    ("nan.csv", GOOD.replace(",4.5\n", ",nan\n", 1), ["tabular", "--target", "price"],
     ["the target 'price' is missing in line 5"]),
    ("same.csv", "a,y\n" + "".join(f"{k * 0.5},cat\n" for k in range(9)), ["tabular", "--target", "y"],
     ["every sample has the class 'cat'", "at least two classes"]),
    ("still.csv", "a,y\n" + "".join(f"{k * 0.5},2.5\n" for k in range(9)), ["tabular", "--target", "y"],
     ["'y' is 2.5 for every sample"]),
    ("names.csv", "a,y\n" + "".join(f"{k * 0.5},person{k}\n" for k in range(99)), ["tabular", "--target", "y"],
     ["'y' has 99 classes in 99 samples", "another target"]),
    ("infinite.csv", "a,y\n" + "".join(f"{k * 0.7},{k * 0.5}\n" for k in range(9)) + "1,inf\n", ["tabular"],
     ["line 11: the target 'y' is infinite"]),
    ("money.csv", "a,y\n" + "".join(f"{k * 0.7},${k}.50\n" for k in range(30)), ["tabular"],
     ["'y' has 30 classes in 30 samples"]),
    ("useless.csv", "id,y\n" + "".join(f"{k},{'ab'[k % 2]}\n" for k in range(30)), ["tabular", "--target", "y"],
     ["no column but 'y' can be learned from", "it only counts the samples"]),
    ("latin.csv", "größe,y\n1,2\n".encode("latin-1"), ["tabular", "--target", "y"],
     ["line 1 is not utf-8 text", "UTF-8"]),
    ("binary.csv", b"a,b\n\0\0\0", ["tabular", "--target", "y"], ["contains zero bytes"]),
    ("broken.csv.gz", gzip.compress(GOOD.encode(), mtime=0)[:40],
     ["tabular", "--target", "y"], ["broken.csv.gz: cannot be read"]),
    ("sheet.xlsx", b"PK", ["tabular"], [".xlsx files are not read", "save the sheet as CSV"]),
    ("data.json", "[]", ["tabular"], [".json files are not read", "CSV, a line per sample"]),
    ("data", "x", ["mlp"], ["its name does not tell what it is", ".csv"]),
    ("photo.jpg", b"x", ["cnn"], ["photo.jpg: is one image", "a folder of images for every class"]),
    ("archive.zip", b"PK", ["cnn"], [".zip files are not read", "unpack it"]),
    ("note.txt", "hello there " * 40, ["gpt", "--validation", "gone.txt"], ["gone.txt: there is no such file"]),
    ("note.txt", "", ["gpt"], ["note.txt: the file is empty"]),
    ("note.txt", "short", ["gpt"], ["5 characters make no piece of 64", "--length"]),
    ("note.txt", "aaaa" * 99, ["gpt"], ["the text is nothing but 'a'"]),
    ("note.txt", "hello there " * 40, ["cnn"], ["cnn is not for a text", "mlcompute train gpt"]),
    ("note.txt", "größe".encode("latin-1"), ["gpt"], ["note.txt: line 1 is not utf-8 text"]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(arguments: list[str], says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command fails with a message, and leaves nothing behind."""
    before = sorted(Path().rglob("*"))
    assert main(arguments) == 1
    said = capsys.readouterr().err
    print(said)
    assert "Traceback" not in said
    assert "--debug" not in said, "not foreseen"
    assert [part for part in says if part not in said] == [], said
    assert "fix" in said or "expected" in said, "and what to do"
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(("name", "content", "arguments", "says"), TABLES)
def test_files(
    name: str, content: str | bytes, arguments: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(["train", arguments[0], "--data", name, *arguments[1:]], says, capsys)


X = np.zeros((12, 8, 8), np.uint8)
Y = np.arange(12) % 3
ARRAYS = [
    ({"images": X, "labels": Y}, [], ["data.npz: lacks x", "images, labels", "x_train and y_train"]),
    ({"x": X}, [], ["data.npz: lacks y"]),
    ({"x": X, "y": Y[:5]}, [], ["12 samples but 5 labels", "a label for every sample"]),
    ({"x": np.full((12, 4), np.nan), "y": Y}, [], ["x is nan in sample 0", "fill in what is missing"]),
    ({"x": np.zeros((12, 4)), "y": np.where(Y == 1, np.nan, Y)}, [], ["y is nan in sample 1"]),
    ({"x": np.zeros((0, 4)), "y": np.zeros(0, int)}, [], ["there are no samples"]),
    ({"x": np.zeros(12), "y": Y}, [], ["x has shape (12,)", "(n, features)"]),
    ({"x": X, "y": np.zeros(12, int)}, [], ["every sample has the class '0'"]),
    ({"x": np.array(["a"] * 12), "y": Y}, [], ["x is made of <U1", "numbers"]),
    ({"x": X, "y": np.array([object()] * 12)}, [], ["cannot be read as .npz", "y.astype(str)"]),
    ({"x": X[:, :2, :2], "y": Y}, ["cnn"], ["2 x 2 pixels are too small"]),
    ({"x": X, "y": Y}, ["mlp", "--target", "y"], ["this is arrays, and target is not for it"]),
]  # fmt: skip


@pytest.mark.parametrize(("arrays", "arguments", "says"), ARRAYS)
def test_arrays(
    arrays: dict[str, np.ndarray], arguments: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("data.npz", **arrays)
    model, *options = arguments or ["mlp"]
    refused(["train", model, "--data", "data.npz", *options], says, capsys)


def picture(path: str, height: int = 8, width: int = 8) -> None:
    image = pytest.importorskip("PIL.Image", reason="images need mlcompute[images]")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(np.arange(height * width, dtype=np.uint8).reshape(height, width)).save(path)


@pytest.mark.parametrize("reader", [mlc.data.read_csv, mlc.data.read_parquet, mlc.data.table, mlc.data.load,
                                    mlc.data.read_npz, mlc.data.read_idx, mlc.data.images, mlc.data.text])  # fmt: skip
@pytest.mark.parametrize("given", [b"a,b", 5, None, ["a", "b"]])
def test_something_that_is_no_path(reader: Any, given: object) -> None:
    with pytest.raises(TypeError, match=f"must be .*name of a file.*, not of type {type(given).__name__}"):
        reader(given)


def test_folders_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(says: list[str], *options: str) -> None:
        refused(["train", "cnn", "--data", "photos", *options], says, capsys)

    wrong(["photos: there is no such file or folder", "where"])
    Path("photo").mkdir()
    wrong(["did you mean photo?"])
    Path("photos").mkdir()
    wrong(["photos: there are no images in the folder", "a folder per class"])
    picture("photos/1.jpg")
    wrong(["the images lie in one folder, nothing says what they show", "photos/cat"])
    Path("photos/1.jpg").unlink()
    picture("photos/cat/1.png")
    wrong(["every sample has the class 'cat'", "at least two classes"])
    Path("photos/dog").mkdir()
    wrong(["photos/dog: there are no images in the folder", "remove it"])
    picture("photos/dog/1.png", 10, 12)
    wrong(["photos: images of 2 sizes", "photos/dog/1.png has 10 x 12", "--size"])
    Path("photos/dog/2.png").write_bytes(b"no image")
    wrong(["photos/dog/2.png: cannot be read as an image", "take it out of the folder"], "--size", "8")
    Path("photos/dog/2.png").write_bytes(b"")
    wrong(["photos/dog/2.png: cannot be read as an image: the file is empty"], "--size", "8")
    picture("photos/dog/2.png", 90, 90)
    Path("photos/dog/2.png").write_bytes(Path("photos/dog/2.png").read_bytes()[:80])
    wrong(["photos/dog/2.png: cannot be read as an image"], "--size", "8")
    Path("photos/dog/2.png").unlink()
    wrong(["this is a folder of images, and target is not for it"], "--target", "y")
    shutil.copy(IRIS, "photo/iris.csv")
    refused(["train", "tabular", "--data", "photo"], ["photo: is a folder", "give the file: photo/iris.csv"], capsys)


def test_words(capsys: pytest.CaptureFixture[str]) -> None:
    refused(["train", "ccn"], ["ccn: neither a recipe nor a Python file", "did you mean cnn?"], capsys)
    words = ["train", "mlp", "--data", "digits", "--validation", "x.npz"]
    refused(words, ["validation is 'x.npz', which is no share", "expected"], capsys)
    refused(["train", "mlp", "--target", "y"], ["--target says what --data is", "give --data PATH"], capsys)
    refused(["new", "resnt"], ["resnt: there is no such recipe; did you mean resnet?", "autoencoder"], capsys)
    refused(["new", "cnn", "cnn.txt"], ["a script is called something.py", "cnn.txt.py"], capsys)
    Path("cnn.py").write_text("mine")
    refused(["new", "cnn"], ["cnn.py: is there already", "--overwrite"], capsys)
    for option, text in (("--size", "big"), ("--column", "age"), ("--augment", "flip=2"), ("--augment", "crop=x")):
        assert main(["train", "mlp", option, text]) == 2
        assert "must be" in (said := capsys.readouterr().err) or "is no number" in said


def test_other_data_than_in_training() -> None:
    data = mlc.data.iris()
    text = IRIS.read_text()
    assert data.preprocessing is not None

    def refuses(content: str, says: list[str], labels: bool = True) -> None:
        Path("new.csv").write_text(content)
        with pytest.raises(mlc.DataError) as error:
            data.preprocessing.read("new.csv", labels=labels)
        assert [part for part in says if part not in str(error.value)] == []

    refuses(text.replace(",setosa", ",sertosa", 3), ["line 2: the label 'sertosa' was not among the classes",
                                                     "did you mean 'setosa'?"])  # fmt: skip
    refuses(text.replace("petal width", "petal_width"), ["lacks the column 'petal width'", "'petal_width'?"])
    refuses(text.replace("petal width", "x"), ["lacks the column 'petal width'", "add it, left empty"])
    refuses(text.replace("5.1,", "long,", 1), ["line 2: 'long' in column 'sepal length' is no number"])
    refuses(text.replace(",species", ",kind"), ["there is no column 'species'"])
    Path("new.csv").write_text(text.replace(",species", ",kind"))
    assert len(data.preprocessing.read("new.csv", labels=False)) == 150, "predictions need no target"
    sums = mlc.data.sums().preprocessing
    assert sums is not None
    with pytest.raises(mlc.DataError, match="the character 'x' was not in the training text"):
        sums.encode("12+x=")  # type: ignore[attr-defined]
    digits = mlc.data.digits().preprocessing
    assert digits is not None
    np.save("wide.npy", np.zeros((3, 9, 9)))
    with pytest.raises(mlc.DataError, match=r"samples of shape \(9, 9\), the model was trained with \(1, 8, 8\)"):
        digits.read("wide.npy", labels=False)


FEATURES, LABELS = np.random.default_rng(0).normal(size=(40, 8)), np.arange(40) % 3


def trainer(*shape: int) -> mlc.Trainer:
    graph = mlc.Graph()
    graph.dense(graph.flatten(graph.input((10, *shape), "x")), 3)
    return mlc.Trainer(graph, loss="softmax_cross_entropy")


PYTHON = [
    (lambda: trainer(8).fit(FEATURES, np.array(["a", "b"] * 20)), "text labels: mlc.data.arrays(x, labels)"),
    (lambda: trainer(8).fit(FEATURES, LABELS + 1), "count from 0: labels - 1"),
    (lambda: trainer(8).fit(FEATURES, LABELS * 2), "give the last layer 5 outputs"),
    (lambda: trainer(8).fit(FEATURES, LABELS.astype(float)), "labels.astype(int)"),
    (lambda: trainer(8).fit(FEATURES), "give y"),
    (lambda: trainer(8).fit(FEATURES, LABELS[:3]), "a label, and a weight, for every sample"),
    (lambda: trainer(8).fit("data.csv"), "a file is read by mlc.data.load('data.csv', ...)"),
    (lambda: trainer(8).fit(FEATURES.astype(object), LABELS), "array.astype('float32')"),
    (lambda: trainer(8).fit(FEATURES[:, :5], LABELS), "build the graph's input with shape (10, 5)"),
    (lambda: trainer(8).predict({"image": FEATURES}), "call it 'x'"),
    (lambda: trainer(3, 8, 8).predict(np.zeros((3, 8, 8))), "array[None]"),
    (lambda: trainer(8, 1).predict(np.zeros(8)), "array[None]"),
    (lambda: trainer(3, 8, 8).predict(np.zeros((5, 8, 8, 3))), "array.transpose(0, 3, 1, 2)"),
    (lambda: trainer(8).fit(mlc.data.iris()), "build the graph's input with shape (10, 4)"),
    (lambda: trainer(4).fit(mlc.data.iris(), LABELS), "leave y and sample_weight out"),
    (lambda: mlc.data.read_csv(IRIS, 4), "the name of a column, not 4"),  # type: ignore[arg-type]
    (lambda: mlc.data.digits().augmented(zoom=2), "there are flip, crop, rotate, colour, mixup"),
    (lambda: mlc.data.iris().augmented(flip=True), "only images are augmented"),
    (lambda: mlc.data.read_csv("."), "expected  a file"),
    (lambda: mlc.data.images(IRIS), "expected  a folder"),
    (lambda: mlc.data.read_csv(IRIS.with_name("irs.csv")), "iris.csv?"),
    (lambda: mlc.load(IRIS.with_name("digit.npz")), "digits.npz?"),
    (lambda: mlc.load("gone/best.safetensors"), "which does not exist either"),
    (lambda: trainer(8).save("gone/best.safetensors"), "make the folder first"),
    (lambda: trainer(8).fit(FEATURES, np.eye(4)[LABELS]), "the last layer as many outputs: 4"),
    (lambda: trainer(8).fit(FEATURES, LABELS, validation=FEATURES), "validation=(x, y)"),
    (lambda: mlc.Trainer(mlc.Graph(), loss="mse"), "add some: graph.dense("),
    (lambda: mlc.Trainer(mlc.Graph(), loss="mse", device="gpu"), "not 'gpu': use mlc.Device.cpu(), mlc.Device.gpu()"),
    (lambda: mlc.callbacks.EarlyStopping("val_los"), "is 'val_loss' meant?"),
    (lambda: trainer(8).training.execute({"input": FEATURES[:10]}, {"labels": LABELS[:10]}), "call it 'x'"),
]


@pytest.mark.parametrize(("call", "says"), PYTHON)
def test_python(call: Callable[[], object], says: str) -> None:
    with pytest.raises((mlc.Error, TypeError)) as error:
        call()
    assert says in str(error.value), error.value


def test_arguments_of_another_type_are_refused_by_name() -> None:
    columns: Any = {"a": np.arange(40) ** 2, "y": np.arange(40) % 3}
    for given, message in (
        ({"seed": "first"}, "seed must be a whole number, not 'first'"),
        ({"validation": None}, "table: validation must be a number, not None"),
        ({"kinds": ["a"]}, "table: kinds must be a dictionary"),
        ({"window": 2.5}, "table: window must be a whole number, not 2.5"),
    ):
        with pytest.raises(TypeError, match=message):
            mlc.data.table(columns, "y", **given)
    for call in (
        lambda: mlc.data.table(columns, "y", validation=columns),
        lambda: mlc.data.arrays(FEATURES, LABELS, validation=FEATURES),
        lambda: mlc.data.arrays(FEATURES, LABELS, test=(FEATURES, LABELS)),
    ):
        with pytest.raises(TypeError, match=r"must be a number, not .*given to fit") as error:
            call()
        assert len(str(error.value)) < 300, "arrays are not printed whole"
    with pytest.raises(mlc.DataError, match=r"y is None\n.*a label for every sample"):
        mlc.data.arrays(FEATURES, None)
    with pytest.raises(mlc.DataError, match=r"x has shape \(\)"):
        mlc.data.arrays(3, LABELS)
    with pytest.raises(mlc.DataError, match="seed is -1"):
        mlc.data.digits(seed=-1)
    with pytest.raises(TypeError, match=r"length must be a whole number, not 2\.5"):
        mlc.data.sums(length=2.5)  # type: ignore[arg-type]
    for mixed, types in (([1, "b"], "number, text"), (["a", None], "NoneType, text")):
        with pytest.raises(mlc.DataError, match=f"y has values of different types: {types}"):
            mlc.data.arrays(np.ones((2, 3)), np.array(mixed, object))
