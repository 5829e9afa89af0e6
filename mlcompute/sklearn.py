"""Networks as scikit-learn estimators: for pipelines, cross-validation and searches over settings.

Imported on demand, `from mlcompute.sklearn import MLCClassifier`; needs scikit-learn, `mlcompute[sklearn]`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import mlcompute as mlc
from mlcompute.building.builder import Activation
from mlcompute.building.choices import LossName, OptimizerName
from mlcompute.errors import DataError
from mlcompute.foreign_names import answers_foreign_keywords
from mlcompute.layers.arguments import number_of

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise ImportError("mlcompute.sklearn: needs scikit-learn 1.6 or later; pip install mlcompute[sklearn]") from None

#: The random stream belongs to the process: estimators that are fitted on several threads take turns with it.
_seeded = threading.Lock()


class _Estimator(BaseEstimator):  # type: ignore[misc]
    @answers_foreign_keywords
    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] | int = (100,),
        *,
        activation: Activation = "relu",
        optimizer: OptimizerName = "adam",
        learning_rate: float = 1e-3,
        epochs: int = 100,
        batch_size: int = 32,
        build: Callable[[int, int, int], mlc.Graph] | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.hidden_layer_sizes, self.activation, self.build = hidden_layer_sizes, activation, build
        self.optimizer, self.learning_rate = optimizer, learning_rate
        self.epochs, self.batch_size, self.random_state, self.verbose = epochs, batch_size, random_state, verbose

    def _fit(self, x: Any, y: Any, outputs: int, loss: LossName) -> None:
        batch = min(number_of(type(self).__name__, "batch_size", self.batch_size, 1), len(x))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with _seeded:
            before = mlc.Platform.rng_state()
            mlc.Platform.set_rng_seed_to(seed)
            try:
                graph = (self.build or self._layers)(batch, x.shape[1], outputs)
                trainer = mlc.Trainer(graph, loss=loss, optimizer=self.optimizer, learning_rate=self.learning_rate)
                shape = trainer.model.prediction.descriptor.shape
                if shape[1:] != (outputs,):
                    raise DataError(
                        f"{type(self).__name__}: build makes a graph with predictions of shape {shape}",
                        expected=f"{outputs} for each sample: {(batch, outputs)}",
                    )
                trainer.fit(x, y, epochs=self.epochs, shuffle_seed=seed, verbose=self.verbose)
            finally:
                mlc.Platform.set_rng_state(before)
        self.trainer_ = trainer

    def _layers(self, batch: int, features: int, outputs: int) -> mlc.Graph:
        graph = mlc.Graph()
        x = graph.input((batch, features), "x")
        sizes = self.hidden_layer_sizes
        for size in sizes if isinstance(sizes, Iterable) else [sizes]:
            x = graph.dense(x, size, activation=self.activation)
        graph.dense(x, outputs, name="scores")
        return graph

    def _scores(self, x: Any) -> Any:
        check_is_fitted(self)
        checked = validate_data(self, x, reset=False)
        return np.asarray(self.trainer_.predict(checked), np.float64)


class MLCClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A network that classifies rows of numbers: dense layers, or what `build` makes.

    hidden_layer_sizes  outputs of the dense layers before the last; a number for one layer
    activation          behind each of them, by name
    optimizer           by name, as `mlc.Trainer` has them
    learning_rate, epochs, batch_size   as for `mlc.Trainer`
    build               `build(batch_size, features, outputs)` makes the graph instead; its last layer gives a score per
                        class, before softmax. A function of a module, if the estimator is to be pickled
    random_state        a whole number: weights, dropout and order of samples repeat
    verbose             as for `Trainer.fit`

    When it is fitted, `classes_` has the classes and `trainer_` the trainer, with history, report and `save`.
    Standardise the numbers first: `make_pipeline(StandardScaler(), MLCClassifier())`.
    """

    def fit(self, X: Any, y: Any) -> MLCClassifier:  # noqa: N803
        """Train a new network with rows X of shape (n, features) and their classes y: numbers or strings."""
        x, labels = validate_data(self, X, y)
        check_classification_targets(labels)
        classes, indices = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise DataError(f"MLCClassifier.fit: y has one class alone, {classes[0]}", fix="give at least two classes")
        self._fit(x, indices, len(classes), "softmax_cross_entropy")
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        """The probability of every class, in the order of `classes_`: (n, classes)."""
        scores = self._scores(X)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> Any:  # noqa: N803
        """The likeliest class of every row: (n,)."""
        scores = self._scores(X)
        return self.classes_[scores.argmax(axis=1)]


class MLCRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A network that predicts numbers from rows of numbers, with the mean squared error as loss.

    Parameters as for `MLCClassifier`; `build`'s last layer gives the predictions. Standardise X, and y too where it is
    far from 1: `TransformedTargetRegressor(MLCRegressor(), transformer=StandardScaler())`.
    """

    def fit(self, X: Any, y: Any) -> MLCRegressor:  # noqa: N803
        """Train a new network with rows X of shape (n, features) and targets y of shape (n,) or (n, outputs)."""
        x, targets = validate_data(self, X, y, multi_output=True, y_numeric=True)
        columns = targets.reshape(len(x), -1)
        self._fit(x, columns, columns.shape[1], "mean_squared_error")
        self._is_flat = targets.ndim == 1
        return self

    def predict(self, X: Any) -> Any:  # noqa: N803
        """The predictions, in the shape y had: (n,) or (n, outputs)."""
        found = self._scores(X)
        return found[:, 0] if self._is_flat else found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


__all__ = ["MLCClassifier", "MLCRegressor"]
