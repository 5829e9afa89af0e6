"""The scikit-learn estimators: scikit-learn's own checks, and what people do with them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc

pytest.importorskip("sklearn", "1.6")

from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from mlcompute.sklearn import MLCClassifier, MLCRegressor

SMALL: dict[str, Any] = {"hidden_layer_sizes": (8,), "epochs": 12, "learning_rate": 0.03, "random_state": 0}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([MLCClassifier(**SMALL), MLCRegressor(**SMALL)])
def test_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


def flowers() -> tuple[Any, Any]:
    found = load_iris()
    return found.data, found.target_names[found.target]


def with_dropout(batch: int, features: int, outputs: int) -> mlc.Graph:
    graph = mlc.Graph()
    hidden = graph.dropout(graph.dense(graph.input((batch, features), "x"), 8, activation="tanh"), 0.2)
    graph.dense(hidden, outputs)
    return graph


def test_string_labels_in_a_pipeline_and_a_search() -> None:
    x, y = flowers()
    pipeline = make_pipeline(StandardScaler(), MLCClassifier(**SMALL))
    search = GridSearchCV(pipeline, {"mlcclassifier__hidden_layer_sizes": [(4,), (16,)]}, cv=2).fit(x, y)
    assert search.best_score_ > 0.9
    best = search.best_estimator_
    assert list(best.classes_) == ["setosa", "versicolor", "virginica"]
    assert best.predict(x[:1]).tolist() == ["setosa"]
    np.testing.assert_allclose(best.predict_proba(x).sum(axis=1), 1)


@pytest.mark.parametrize("build", [None, with_dropout])
def test_the_same_seed_gives_the_same_network_and_leaves_the_stream_alone(build: Any) -> None:
    x, y = flowers()
    estimator = MLCClassifier(**SMALL, build=build)
    mlc.Platform.set_rng_seed_to(5)
    before = mlc.Platform.rng_state()
    first = estimator.fit(x, y).predict_proba(x)
    assert mlc.Platform.rng_state() == before
    np.testing.assert_array_equal(clone(estimator).fit(x, y).predict_proba(x), first)
    assert not np.array_equal(clone(estimator).set_params(random_state=1).fit(x, y).predict_proba(x), first)


def test_it_travels_in_a_pickle() -> None:
    x, y = flowers()
    fitted = MLCClassifier(**SMALL, build=with_dropout).fit(x, y)
    there = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(there.predict_proba(x), fitted.predict_proba(x))
    assert there.score(x, y) == fitted.score(x, y)


def test_regression_with_one_target_and_with_several() -> None:
    x = np.random.default_rng(0).standard_normal((200, 3))
    several = np.stack([x[:, 0] - x[:, 1], x[:, 2]], axis=1)
    estimator = MLCRegressor(**SMALL)
    assert estimator.fit(x, several).predict(x).shape == (200, 2)
    assert estimator.score(x, several) > 0.9
    assert estimator.fit(x, several[:, 0]).predict(x).shape == (200,)


def test_a_number_for_one_hidden_layer() -> None:
    x, y = flowers()
    one, other = (MLCClassifier(sizes, epochs=2, random_state=0).fit(x, y) for sizes in (8, (8,)))
    np.testing.assert_array_equal(one.predict_proba(x), other.predict_proba(x))


def test_what_it_refuses() -> None:
    for kind in (MLCClassifier, MLCRegressor):
        wide = kind(build=lambda batch, features, outputs: with_dropout(batch, features, outputs + 1))
        with pytest.raises(mlc.DataError, match=r"a graph with predictions of shape \(32, 4\)\n  expected  3"):
            wide.fit(flowers()[0], np.arange(150) % 3 if kind is MLCClassifier else np.ones((150, 3)))
    x, y = flowers()
    with pytest.raises(ValueError, match="one class alone, setosa"):
        MLCClassifier().fit(x[:9], y[:9])
    with pytest.raises(ValueError, match="MLCClassifier: batch_size"):
        MLCClassifier(batch_size=0).fit(x, y)


def test_scikit_learn_is_imported_on_demand() -> None:
    code = "import sys, mlcompute; assert 'sklearn' not in sys.modules; sys.modules['sklearn'] = None; "
    code += "import mlcompute.sklearn"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install mlcompute[sklearn]" in ran.stderr


def test_settings_of_the_networks_of_scikit_learn() -> None:
    for given, ours in (("max_iter", "epochs"), ("solver", "optimizer"), ("learning_rate_init", "learning_rate")):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{given}': use {ours}="):
            MLCClassifier(**{given: 1})
    assert MLCRegressor(epochs=3).get_params()["epochs"] == 3
