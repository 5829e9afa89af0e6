"""The picture of a graph: well-formed, complete, nothing overlaps, and large graphs stay small."""

from __future__ import annotations

import itertools
import random
import re
import time
import xml.etree.ElementTree as ElementTree

import pytest

import mlcompute as mlc
from mlcompute.seeing.diagram import diagram_of
from mlcompute.seeing.layout import GAP_X, GAP_Y, lay_out
from tests.nets import Regression, sgd
from tests.seeing.nets import HOSTILE, Classifier, chain


def test_boxes_and_arrows_are_those_of_the_dot_text() -> None:
    net = Classifier()
    net.training.stop_gradient([net.training.source_tensors(net.training.layers[-1])[0]])
    diagram, dot = diagram_of(net.training, 100), net.training.summarized_dot_description
    assert len(diagram.boxes) == dot.count("shape=")
    assert len(diagram.arrows) == dot.count("->")
    assert sum(arrow.stopped for arrow in diagram.arrows) == dot.count("style=dashed") == 1
    assert {box.label for box in diagram.boxes if box.family == "input"} == {"x", "t"}
    for box in diagram.boxes:
        if box.layers:
            assert f'"{box.label}\\n' in dot


def test_it_is_a_picture_of_its_own() -> None:
    root = ElementTree.fromstring(Classifier(label=HOSTILE).training.svg())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    tags = {element.tag.split("}")[1] for element in root.iter()}
    assert tags <= {"svg", "title", "style", "rect", "g", "path", "text"}, "no script, no image, no link"
    style = "".join(element.text or "" for element in root.iter() if element.tag.endswith("style"))
    assert "prefers-color-scheme:dark" in style
    assert "url(" not in style
    assert "http" not in style


def test_notebooks_show_the_picture_in_their_own_colours() -> None:
    html = Classifier(label=HOSTILE).training._repr_html_()
    assert "<svg" in html
    assert "prefers-color-scheme" not in html, "a notebook's theme is not the system's"
    assert "<script" not in html
    assert "<img" not in html


def test_a_chain_is_straight_and_a_shortcut_passes_beside_it() -> None:
    sizes = [(100.0 + 20 * (index % 3), 40.0) for index in range(6)]
    layout = lay_out(sizes, [*itertools.pairwise(range(6)), (1, 4)])
    assert max(layout.x) - min(layout.x) < 1e-6
    assert layout.y == [20.0 + index * (40.0 + GAP_Y) for index in range(6)]
    places = {x for x, _ in layout.bends[1, 4]}
    assert len(places) == 1, "without a kink"
    assert min(abs(place - layout.x[2]) for place in places) >= max(width for width, _ in sizes) / 2


def test_branches_stand_side_by_side_around_the_middle() -> None:
    layout = lay_out([(100.0, 40.0)] * 5, [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)])
    assert sorted(layout.x[1:4]) == layout.x[1:4]
    assert layout.x[0] == pytest.approx(layout.x[4]) == pytest.approx(sum(layout.x[1:4]) / 3)
    assert layout.x[2] - layout.x[1] == pytest.approx(100.0 + GAP_X)


@pytest.mark.parametrize("seed", range(8))
def test_boxes_never_overlap_and_arrows_point_down(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 60)
    sizes = [(rng.uniform(40, 200), 40.0) for _ in range(count)]
    edges = {(rng.randrange(max(0, target - 9), target), target) for target in range(1, count) for _ in range(2)}
    layout = lay_out(sizes, sorted(edges))
    rows: dict[float, list[int]] = {}
    for index, y in enumerate(layout.y):
        rows.setdefault(y, []).append(index)
    for row in rows.values():
        row.sort(key=layout.x.__getitem__)
        for left, right in itertools.pairwise(row):
            assert layout.x[right] - layout.x[left] >= (sizes[left][0] + sizes[right][0]) / 2 + GAP_X - 1e-6
    for source, target in edges:
        assert layout.y[source] < layout.y[target]
        heights = [layout.y[source], *(y for _, y in layout.bends[source, target]), layout.y[target]]
        assert heights == sorted(heights)
    assert min(layout.x) >= 0
    assert max(layout.x) <= layout.width


def test_a_thousand_layers_in_a_small_picture() -> None:
    graph = chain(1000)
    start = time.process_time()
    picture = graph.svg()
    assert time.process_time() - start < 5.0
    assert len(picture) < 200_000
    diagram = diagram_of(graph, 120)
    assert len(diagram.boxes) <= 121
    assert [index for box in diagram.boxes for index in box.layers] == list(range(1000)), "every layer is in one box"
    assert all(arrow.source < arrow.target for arrow in diagram.arrows)
    assert "12 layers: " in picture
    assert graph.svg(most_boxes=10).count('class="group"') <= 10
    assert graph.svg(most_boxes=2000).count('role="img"') == 1


def test_a_wide_graph_is_cut_somewhere_all_the_same() -> None:
    """Every tensor is used again at the end: there is no place where only one passes."""
    graph, x = mlc.Graph(), mlc.Tensor(shape=(2, 4))
    made = [graph.node(mlc.ActivationLayer.relu(), source=x) for _ in range(300)]
    graph.concatenate(made, dimension=1)
    assert len(diagram_of(graph, 50).boxes) <= 52


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "10"])
def test_a_wrong_number_of_boxes_is_refused(wrong: object) -> None:
    with pytest.raises(mlc.DataError, match=rf"Graph.svg: most_boxes is {re.escape(repr(wrong))}"):
        mlc.Graph().svg(most_boxes=wrong)  # type: ignore[arg-type]


def test_empty_and_tiny_graphs() -> None:
    ElementTree.fromstring(mlc.Graph().svg())
    ElementTree.fromstring(Regression(sgd()).graph.svg())
