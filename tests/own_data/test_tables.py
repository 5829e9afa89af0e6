"""Tables and time series: what columns become, by hand; what is held out; and that checkpoints keep it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.data import csv_file
from mlcompute.data.columns import learned
from mlcompute.data.splitting import Split
from mlcompute.data.target import looks_like_classes

TEXT = """age,colour,joined,id,income
30,red,2020-01-01,1,1000.5
?,blue,2020-01-03,2,2000.5
50,red,2020-01-02,3,3000.5
40,,2020-01-05,4,4000.5
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def by_hand() -> np.ndarray:
    """age, age is missing, colour = (missing), blue, red, joined, id: as text-book formulas give them."""

    def scaled(values: list[float]) -> np.ndarray:
        return (np.array(values) - np.mean(values)) / np.std(values)

    age = scaled([30, 50, 40])
    columns = [
        [age[0], 0, age[1], age[2]], [0, 1, 0, 0],
        [0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 0],
        scaled([0, 2, 1, 4]), scaled([1, 2, 3, 4]),
    ]  # fmt: skip
    return np.array(columns, np.float32).T


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("people.csv", TEXT),
        ("people.tsv", TEXT.replace(",", "\t")),
        ("people.csv", TEXT.replace(",", ";").replace(".5", ",5")),
        ("people.csv", "\ufeff" + TEXT.replace("\n", "\r\n") + "\r\n"),
    ],
)
def test_columns_by_hand(name: str, text: str) -> None:
    Path(name).write_bytes(text.encode())
    data = mlc.data.read_csv(name, "income", validation=0.0)
    np.testing.assert_allclose(data.x, by_hand(), rtol=1e-6)
    incomes = np.array([1000.5, 2000.5, 3000.5, 4000.5])
    np.testing.assert_allclose(data.y[:, 0], (incomes - incomes.mean()) / incomes.std(), rtol=1e-6)
    assert (data.loss, data.metrics, data.outputs, data.validation) == ("mse", ["r2"], 1, None)
    assert data.preprocessing is not None
    np.testing.assert_allclose(data.preprocessing.decode(data.y)[:, 0], incomes)
    shown = str(data)
    for part in (
        "4 samples",
        "age     number    mean 40, standard deviation 8.165, 1 missing",
        "3 values, one-hot",
        "2020-01-01 to 2020-01-05",
        "income  target    a number, mean 2500, standard deviation 1118",
    ):
        assert part in shown  # fmt: skip


@pytest.mark.parametrize(
    ("name", "separator", "columns", "expected"),
    [
        ("english", ",", {"a": ['"1,234.5"', "987"]}, {"a": [1234.5, 987]}),
        ("whole numbers", ",", {"a": ['"1,234"', "987"]}, {"a": [1234, 987]}),
        ("quoted decimal commas", ",", {"a": ['"1,25"', "9"]}, {"a": [1.25, 9]}),
        ("german", ";", {"a": ["1.234,5", "987,25"]}, {"a": [1234.5, 987.25]}),
        ("a column tells of another", ";", {"a": ["1.234", "987"], "b": ["0,5", "1,25"]}, {"a": [1234, 987]}),
        ("tabs", "\t", {"a": ["1,234", "12,345"], "b": ["0.5", "1.25"]}, {"a": [1234, 12345]}),
        ("three decimals", ";", {"a": ["1.234", "9.870"]}, {"a": [1.234, 9.87]}),
        ("three decimals, commas", ";", {"a": ["1,234", "9,870"]}, {"a": [1.234, 9.87]}),
        ("millions", ";", {"a": ["1.234.567", "987"]}, {"a": [1234567, 987]}),
        ("spaces", ";", {"a": ["1\u202f234,5", "12 345"]}, {"a": [1234.5, 12345]}),
        ("apostrophes", ",", {"a": ["1'234.50", "7"]}, {"a": [1234.5, 7]}),
        ("exponents", ",", {"a": ["1e3", "-.5E-1"]}, {"a": [1000, -0.05]}),
        ("missing", ",", {"a": ["#N/A", "<NA>", "--", "2.5", "NaT", "n.a.", "missing", "."]}, {"a": [2.5]}),
        ("what is no number", ",", {"a": ["1_000", "2_000"], "b": ["1,23,4", "4"]}, {}),
    ],
)
def test_numbers_as_people_write_them(
    name: str, separator: str, columns: dict[str, list[str]], expected: dict[str, list[float]]
) -> None:
    quoted = {
        name: [f'"{text}"' if "," in text and '"' not in text else text for text in c] for name, c in columns.items()
    }
    lines = [separator.join(row) for row in zip(*quoted.values(), strict=True)]
    Path("numbers.csv").write_text("\n".join([separator.join(columns), *lines]))
    found = csv_file.read_frame(Path("numbers.csv"), separator=separator).columns
    for column, values in found.items():
        known = values[~np.isnan(values)].tolist() if values.dtype.kind == "f" else []
        assert known == expected.get(column, known)
    assert all(found[column].dtype.kind != "f" for column in columns if not expected)


def test_the_decimal_mark_is_asked_for_where_nobody_can_tell() -> None:
    Path("towns.csv").write_text("people;area\n1.234;12.345\n987;1.000\n")
    with pytest.raises(mlc.DataError, match=r"line 2: '1.234' in column 'people' can be 1.234 or 1234") as refused:
        csv_file.read_frame(Path("towns.csv"))
    assert "--decimal ," in refused.value.fix
    frame = csv_file.read_frame(Path("towns.csv"), decimal=",")
    assert frame.columns["area"].tolist() == [12345, 1000]
    # New data that does not tell is read as the training data was.
    rows = "".join(f"{k}.{k:03},5;{k % 3},25\n" for k in range(1, 30))
    Path("train.csv").write_text(f"people;y\n{rows}")
    Path("new.csv").write_text("people\n1.234\n")
    preprocessing = mlc.data.read_csv("train.csv", "y").preprocessing
    column = preprocessing.columns[0]  # type: ignore[union-attr]
    x = preprocessing.read("new.csv", labels=False).x  # type: ignore[union-attr]
    assert x[0, 0] * column.std + column.mean == pytest.approx(1234)


def test_numbers_of_new_data_are_read_as_those_of_the_training_data_or_refused() -> None:
    def read(trained: str, new: Any) -> float:
        rows = "".join(f"{trained.format(k * 37 % 100)};{k % 3}\n" for k in range(1, 30))
        Path("train.csv").write_text(f"price;y\n{rows}")
        preprocessing = mlc.data.read_csv("train.csv", "y").preprocessing
        if isinstance(new, str):
            Path("new.csv").write_text(new)
            new = "new.csv"
        column = preprocessing.columns[0]  # type: ignore[union-attr]
        return preprocessing.read(new, labels=False).x[0, 0] * column.std + column.mean  # type: ignore[union-attr]

    # Points, or no marks, in training: 1,234 can be thousands, or from a spreadsheet in another language.
    for trained, new in (
        ("1.{:02}", "price;a\n1,234;x\n"),
        ("1{:03}", "price;a\n1,234;x\n"),
        ("1,{:02}", "price;a\n1.234;x\n"),
        ("1,{:02}", {"price": ["1.234"]}),
    ):
        text = "1,234" if "1,234" in new else "1.234"
        with pytest.raises(mlc.DataError, match=f"'{text}' in column 'price' can be ") as refused:
            read(trained, new)
        assert refused.value.fix.startswith(f"the training data does not tell which: write 1234 or {text}0; ")
    assert read("1.{:02}", "price;a\n1,2340;x\n") == pytest.approx(1.234)
    assert read("1.{:02}", "price;a\n1.234;x\n") == pytest.approx(1.234)
    assert read("1,{:03}.5", "price;a\n1,234;x\n") == pytest.approx(1234), "training shows thousands"
    assert read("1.{:03},5", {"price": ["1.234"]}) == pytest.approx(1234)
    # Thousands in training, and new data that another program wrote: with decimal commas, perhaps.
    rows = "".join(f'"1,{k * 37 % 100:03}.5",{k % 3}\n' for k in range(1, 30))
    Path("train.csv").write_text(f"price,y\n{rows}")
    Path("new.csv").write_text("price;a\n1,234;x\n")
    preprocessing: Any = mlc.data.read_csv("train.csv", "y").preprocessing
    with pytest.raises(mlc.DataError, match=r"line 2: '1,234' in column 'price' can be 1234 or 1\.234"):
        preprocessing.read("new.csv", labels=False)
    for text in ('price,a\n"1,234",x\n', "price;a\n1,234;x\n2,345.5;x\n"):
        Path("new.csv").write_text(text)
        x = preprocessing.read("new.csv", labels=False).x[0, 0]
        assert x * preprocessing.columns[0].std + preprocessing.columns[0].mean == pytest.approx(1234)
    assert read("1{:03}", "price,a\n1.234,x\n") == pytest.approx(1.234, 1e-3), "beside commas points are decimal"
    assert read("1,{:02}", {"price": [1.234]}) == pytest.approx(1.234), "numbers in memory are no text"


def test_what_spreadsheets_and_other_programs_write() -> None:
    def read(text: str) -> dict[str, list[Any]]:
        Path("t.csv").write_bytes(text.encode())
        return {name: values.tolist() for name, values in csv_file.read_frame(Path("t.csv")).columns.items()}

    plain = {"a": [1.0, 2.0], "b": ["x", "y"]}
    assert read("a,b\n1,x\n2,y\n") == plain
    assert read("sep=;\r\na;b\r\n1;x\r\n2;y\r\n") == plain
    assert read("a,b,,\n1,x,,\n2,y,,\n") == plain, "empty columns at the right"
    assert read('a, "b"\n1, "x"\n2, "y"\n') == plain
    assert read("a,b\r1,x\r2,y\r") == plain
    assert list(read('"a, in m, with, commas";b\n1;x\n2;y\n')) == ["a, in m, with, commas", "b"]
    assert read("a,b\n1,x\u2028x\n2,y\x0c\n")["b"] == ["x\u2028x", "y"], "these end no line"
    assert read('a,b\n1,"x\nx"\n2,y\n')["b"] == ["x\nx", "y"]
    Path("t.csv").write_text(",a,label\n" + "".join(f"{k * 7 % 50},{k % 5},{k % 2}\n" for k in range(50)))
    assert "ignored   left out: it has no name" in str(mlc.data.read_csv("t.csv")), "the index of a DataFrame"


def test_lines_of_separators_alone_are_samples_of_missing_values() -> None:
    """Predictions stand in the order of the lines; in training such a line is left out, and it is said."""
    rows = [f"{k * 7 % 40},{'red' if k % 2 else 'blue'},{k % 7}.5\n" for k in range(40)]
    Path("t.csv").write_text("size,colour,y\n" + "".join([*rows[:9], ",,\n", *rows[9:], ",,\n"]))
    Path("whole.csv").write_text("size,colour,y\n" + "".join(rows))
    data, whole = mlc.data.read_csv("t.csv", "y"), mlc.data.read_csv("whole.csv", "y")
    np.testing.assert_array_equal(data.x, whole.x)
    np.testing.assert_array_equal(data.y, whole.y)
    assert data.notes[-1] == "lines 11, 43 left out: no column has a value"
    prepared = data.preprocessing
    assert prepared is not None
    assert prepared.read("t.csv").notes == data.notes[-1:]
    assert data.validated_with("t.csv").notes[-1] == f"t.csv: {data.notes[-1]}"
    Path("new.csv").write_text("size,colour\n1,red\n,\n3,blue\n \n\n,\n")
    new = prepared.read("new.csv", labels=False)
    assert len(new) == 4, "an empty line is no line of the table"
    np.testing.assert_array_equal(new.x[[1, 3]], np.zeros((2, 3), np.float32))
    assert new.notes == (
        "colour: 2 values that training has not seen",
        "size: 2 missing, where training had every value: the mean is taken",
    )
    assert new.sample_names == ("line 2", "line 3", "line 4", "line 7")
    Path("new.csv").write_text("size,colour\n1,red\n,,,\n3,blue\n")
    with pytest.raises(mlc.DataError, match="line 3 has 4 fields, the first line 2"):
        prepared.read("new.csv", labels=False)
    Path("t.csv").write_text("size,colour,y\n,,\n,,\n")
    with pytest.raises(mlc.DataError, match="no line holds a value"):
        mlc.data.read_csv("t.csv", "y")


def test_empty_lines_of_a_single_column_are_missing_values() -> None:
    Path("one.csv").write_text("size\n1\n\n3\n\n\n")
    np.testing.assert_array_equal(csv_file.read_frame(Path("one.csv")).columns["size"], [1, np.nan, 3])
    assert csv_file.read_frame(Path("one.csv")).lines == [2, 3, 4]


def test_no_line_of_a_series_goes_missing() -> None:
    rows = [f"{np.sin(k):.3f},{k % 5}\n" for k in range(60)]
    Path("s.csv").write_text("y,hour\n" + "".join([*rows, ",\n", ",\n"]))
    data = mlc.data.read_csv("s.csv", "y", window=4)
    assert data.notes[-1] == "lines 62, 63 left out: no column has a value"
    assert len(data) + len(data.validation) == 60 - 4 - 4, "no window reaches from one part into the other"
    Path("s.csv").write_text("y,hour\n" + "".join([*rows[:9], ",\n", *rows[9:]]))
    with pytest.raises(mlc.DataError, match="the target 'y' is missing in line 11"):
        mlc.data.read_csv("s.csv", "y", window=4)
    new = data.preprocessing.read("s.csv", labels=False)  # type: ignore[union-attr]
    assert len(new) == 61 - 3
    assert "hour: 1 missing, where training had every value: the mean is taken" in new.notes


def test_dates() -> None:
    times = [
        "2026-01-01",
        "2026-01-01T12:00:00Z",
        "2026-01-01 12:00:00.25+02:00",
        "2026-01-01 12:00-0530",
        "2026-01-01T06",
    ]
    Path("t.csv").write_text("when,y\n" + "".join(f"{time},{k}.5\n" for k, time in enumerate(times)))
    frame = csv_file.read_frame(Path("t.csv"))
    column = learned(frame, "when", None, np.arange(5))
    assert column.kind == "date"
    hours = (column.numbers(frame)[0] * column.std + column.mean) % 1 * 24
    np.testing.assert_allclose(hours, [0, 12, 10, 17.5, 6], atol=1e-4)
    Path("t.csv").write_text(
        "when,a,y\n" + "".join(f"{k:02}.{k % 12 + 1:02}.2026,{k % 5},{k % 7}.5\n" for k in range(1, 29)) * 2
    )
    assert "26 different texts in 45 samples, as '01.02.2026'; dates are read as 2026-11-16" in str(
        mlc.data.read_csv("t.csv", "y")
    )


def test_parquet_is_read_as_csv_is() -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs mlcompute[parquet]")
    from pyarrow import parquet

    Path("people.csv").write_text(TEXT)
    table = pyarrow.table({
        "age": pyarrow.array([30, None, 50, 40], pyarrow.int32()), "colour": ["red", "blue", "red", None],
        "joined": np.array(["2020-01-01", "2020-01-03", "2020-01-02", "2020-01-05"], "datetime64[D]"),
        "id": [1, 2, 3, 4], "income": [1000.5, 2000.5, 3000.5, 4000.5],
    })  # fmt: skip
    parquet.write_table(table, "people.parquet")
    one, other = (mlc.data.load(f"people.{kind}", target="income", validation=0.0) for kind in ("csv", "parquet"))
    np.testing.assert_array_equal(one.x, other.x)
    np.testing.assert_array_equal(one.y, other.y)
    parquet.write_table(pyarrow.table({"a": [[1], [2]], "y": [1, 2]}), "nested.parquet")
    with pytest.raises(mlc.DataError, match="column 'a' holds list"):
        mlc.data.read_parquet("nested.parquet", "y")


def test_tables_in_memory_are_read_as_csv_is() -> None:
    Path("people.csv").write_text(TEXT)
    columns = {
        "age": np.array([30, np.nan, 50, 40]), "colour": ["red", "blue", "red", None],
        "joined": np.array(["2020-01-01", "2020-01-03", "2020-01-02", "2020-01-05"], "datetime64[ns]"),
        "id": [1, 2, 3, 4], "income": np.array([1000.5, 2000.5, 3000.5, 4000.5], object),
    }  # fmt: skip
    one = mlc.data.read_csv("people.csv", "income", validation=0.0)
    other = mlc.data.table(columns, "income", validation=0.0)
    np.testing.assert_array_equal(one.x, other.x)
    np.testing.assert_array_equal(one.y, other.y)
    assert one.preprocessing is not None
    np.testing.assert_array_equal(one.preprocessing.read(columns).x, one.x)
    for wrong in ({}, {"a": [1, 2], "y": [1]}, {"a": [[1], [2]], "y": [1, 2]}):
        with pytest.raises(mlc.DataError, match="one axis, one length and a value"):
            mlc.data.table(wrong, "y")
    with pytest.raises(mlc.DataError, match=r"(?s)table: there are no rows.*columns a, y"):
        mlc.data.table({"a": [], "y": []}, "y")


def test_kinds_can_be_said() -> None:
    Path("people.csv").write_text(TEXT)
    data = mlc.data.read_csv("people.csv", "income", validation=0.0, kinds={"id": "category", "joined": "ignored"})
    assert data.preprocessing.features == [  # type: ignore[union-attr]
        "age", "age is missing", "colour = (missing)", "colour = blue", "colour = red",
        "id = 1", "id = 2", "id = 3", "id = 4",
    ]  # fmt: skip
    assert data.shape == (9,)


def test_categories_are_the_same_whatever_stands_beside_them() -> None:
    """A column of 007 and A12 is text; the 007 alone, in another file, is a column of numbers."""

    def codes(trained: list[str], new: list[str], separator: str = ",", **kinds: Any) -> list[int]:
        rows = (f"{text}{separator}{k % 2}\n" for k, text in enumerate(trained * 10))
        Path("a.csv").write_text(f"code{separator}y\n" + "".join(rows))
        Path("b.csv").write_text(f"code{separator}y\n" + "".join(f"{text}{separator}0\n" for text in new))
        prepared = mlc.data.read_csv("a.csv", "y", kinds=kinds or None).preprocessing
        assert prepared is not None
        found = prepared.read("b.csv", labels=False).x
        return [int(row.argmax()) if row.any() else -1 for row in found]

    assert codes(["007", "7", "A12"], ["7", "007", "0007"]) == [1, 0, -1]
    assert codes(["1.50", "2.00", "none yet"], ["2.00", "1.50"]) == [1, 0]
    assert codes(["1", "2"], ["01", "2.0", "3"], code="category") == [0, 1, -1]
    assert codes(["1", "2"], ["2", "two"], code="category") == [1, -1]
    assert codes(["1,5", "2,5"], ["2,50", "1,5"], ";", code="category") == [1, 0]


def test_many_categories_are_embedded() -> None:
    cities = [f"city{k % 25:02}" for k in range(100)]
    Path("cities.csv").write_text("city,size,label\n" + "".join(f"{c},{k % 9},{k % 3}\n" for k, c in enumerate(cities)))
    data = mlc.data.read_csv("cities.csv")
    assert data.classes == ("0", "1", "2"), "a column called label, with few whole numbers"
    assert data.x["city"].dtype == np.int64
    assert data.x["city"].min() == 1, "0 is for cities that are not known"
    graph = mlc.Graph()
    x = data.input(graph, 10)
    assert x.descriptor.shape == (10, 1 + 13)
    graph.dense(graph.dense(x, 8), 3)
    trainer = mlc.Trainer(graph, loss=data.loss, metrics=data.metrics)
    trainer.fit(data, verbose=0)
    trainer.save("cities.safetensors")
    Path("new.csv").write_text("size,city\n3,city01\n4,Atlantis\n")
    preprocessing = mlc.data.preprocessing_of("cities.safetensors")
    assert preprocessing is not None
    new = preprocessing.read("new.csv", labels=False)
    assert new.x["city"].tolist() == [2, 0]
    assert new.notes == ("city: 1 value that training has not seen",)
    Path("holes.csv").write_text("size,city\n,city01\n4,city01\n")
    holes = preprocessing.read("holes.csv", labels=False)
    assert holes.notes == ("size: 1 missing, where training had every value: the mean is taken",)
    assert set(preprocessing.decode(trainer.predict(new))) <= {"0", "1", "2"}


def test_numbers_or_classes() -> None:
    rng = np.random.default_rng(0)
    assert looks_like_classes(rng.integers(0, 10, 100))
    assert not looks_like_classes(rng.integers(0, 1000, 100)), "prices"
    assert not looks_like_classes(rng.normal(size=100))
    assert not looks_like_classes(rng.integers(1, 8, 100) * 1000), "prices, too"
    assert looks_like_classes(np.array([0.0, 1.0, 1.0]))


def test_splits_are_stratified_and_repeatable() -> None:
    classes = np.repeat([0, 1, 2, 3], [50, 30, 19, 1])
    split = Split(0.2, 0.1, seed=3)
    _, validation, test = parts = split.parts("x", 100, classes)
    assert sorted(np.concatenate(parts)) == list(range(100))
    assert np.bincount(classes[validation], minlength=4).tolist() == [10, 6, 4, 0], "an only one is learned"
    assert np.bincount(classes[test], minlength=4).tolist() == [5, 3, 2, 0]
    for one, other in zip(parts, split.parts("x", 100, classes), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(validation, Split(0.2, 0.1, seed=4).parts("x", 100, classes).validation)
    assert [len(part) for part in Split(0.2).parts("x", 4)] == [4, 0, 0]
    ordered = Split(0.2, 0.1, in_order=True).parts("x", 10)
    assert [part.tolist() for part in ordered] == [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9]]


def test_what_is_learned_comes_from_the_training_samples() -> None:
    rows = [f"{k},{'ab'[k % 2]}" for k in np.random.default_rng(0).permutation(50)]
    Path("t.csv").write_text("\n".join(["n,y", *rows]))
    data = mlc.data.read_csv("t.csv", validation=0.4)
    assert data.x.mean() == pytest.approx(0, abs=1e-6)
    assert data.x.std() == pytest.approx(1, abs=1e-5)
    assert abs(data.validation.x.mean()) > 1e-3  # type: ignore[union-attr]
    assert data.preprocessing is not None
    again = data.preprocessing.read("t.csv")
    parts = data.preprocessing.parts(again)
    np.testing.assert_array_equal(again.subset(parts.validation).x, data.validation.x)  # type: ignore[union-attr]
    own = mlc.data.read_csv("t.csv", validation="t.csv")
    assert (len(own), len(own.validation or ())) == (50, 50)


def test_windows_of_a_series() -> None:
    values = np.arange(30) ** 2
    Path("series.csv").write_text("t,value\n" + "".join(f"{k},{v}\n" for k, v in enumerate(values)))
    bare = mlc.data.read_csv("series.csv", "value", window=4)
    assert bare.shape == (4, 1), "a column that only counts the lines is left out"
    assert "left out: it only counts" in str(bare)
    data = mlc.data.read_csv("series.csv", "value", window=4, horizon=2, validation=0.2, kinds={"t": "number"})
    held = data.validation
    assert held is not None
    assert data.shape == (4, 2)
    preprocessing = data.preprocessing
    assert preprocessing is not None
    columns, target = preprocessing.columns, preprocessing.target  # type: ignore[attr-defined]
    raw = data.x[..., 1] * columns[1].std + columns[1].mean
    np.testing.assert_allclose(raw[3], values[3:7], rtol=1e-4)
    np.testing.assert_allclose(preprocessing.decode(data.y)[:, 0], values[5 : 5 + len(data)], rtol=1e-4)
    first_held = held.x[0, 0, 0] * columns[0].std + columns[0].mean
    last_seen = len(data) - 1 + 4 - 1 + 2
    assert last_seen < round(float(first_held)), "no line is both learned from and held out"
    assert columns[0].mean == pytest.approx(np.arange(len(data) + 3).mean()), "nor is its mean"
    assert target.outputs == 1
    assert len(preprocessing.parts(preprocessing.read("series.csv")).train) == len(data)
    with pytest.raises(mlc.DataError, match="leave no window of 4 to learn from"):
        mlc.data.read_csv("series.csv", "value", window=4, horizon=5, validation=0.8)
    everything = preprocessing.read("series.csv", labels=False)
    assert len(everything) == 27
    assert everything.sample_names[-1] == "after line 31", "the last one is a forecast"


def test_the_time_of_a_series() -> None:
    days = np.datetime64("2026-01-01") + np.arange(40)
    days[20:] += 9

    def read(days: Any, **options: Any) -> mlc.data.Dataset:
        Path("t.csv").write_text("day,v\n" + "".join(f"{day},{k % 7}\n" for k, day in enumerate(days)))
        return mlc.data.read_csv("t.csv", "v", window=4, **options)

    assert read(days).notes[-1] == "day: steps are 1 days mostly, 10 before line 22; windows count lines, not days"
    assert "steps" not in str(read(days[:20]))
    with pytest.raises(mlc.DataError, match="line 3: column 'day' goes back in time") as refused:
        read(days[::-1])
    assert "--column day=ignored" in refused.value.fix
    assert read(days[::-1], kinds={"day": "ignored"}).shape == (4, 1)


def test_text_in_pieces() -> None:
    Path("book.txt").write_text("abcab" * 40)
    data = mlc.data.text("book.txt", length=8)
    assert (data.shape, data.outputs, data.loss) == ((8,), 3, "softmax_cross_entropy")
    np.testing.assert_array_equal(data.x[0], [0, 1, 2, 0, 1, 0, 1, 2])
    np.testing.assert_array_equal(data.x.ravel()[1:], data.y.ravel()[:-1])
    Path("other.txt").write_text("cab" * 9)
    assert len(mlc.data.text("book.txt", length=8, validation="other.txt").validation or ()) == 3
    preprocessing = data.preprocessing
    assert preprocessing.decode(preprocessing.encode("cab")) == "cab"  # type: ignore[union-attr]
    Path("book.txt").write_text("größer " * 40)
    raw = mlc.data.text("book.txt", length=8, level="byte").preprocessing
    for encoding in ("utf-8-sig", "utf-16", "cp1252"):
        Path("other.txt").write_bytes(("größer " * 40).encode(encoding))
        same = mlc.data.text("other.txt", length=8, encoding="utf-8" if "utf" in encoding else encoding)
        assert same.preprocessing.letters == " egrßö"  # type: ignore[union-attr]
        assert len(same.preprocessing.read("other.txt")) == 34  # type: ignore[union-attr]
    assert raw.decode(raw.encode("größer")) == "größer"  # type: ignore[union-attr]
    assert raw.outputs == 256  # type: ignore[union-attr]
