"""A grid search of scikit-learn on a cluster."""

from __future__ import annotations

import os
from typing import Any

import joblib
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

import fray
from fray import blocking


class Elsewhere(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifier that fails in the driver's process."""

    def __init__(self, driver: int = 0, c: float = 1.0) -> None:
        self.driver, self.c = driver, c

    def fit(self, x: Any, y: Any) -> Elsewhere:
        assert os.getpid() != self.driver
        self.model_ = LogisticRegression(C=self.c).fit(x, y)
        self.classes_ = self.model_.classes_
        return self

    def predict(self, x: Any) -> Any:
        return self.model_.predict(x)


def test_a_grid_search_runs_on_a_cluster_and_finds_what_it_finds_alone() -> None:
    x, y = make_classification(300, 10, random_state=0)
    grid = {"C": [0.001, 0.1, 10.0]}
    alone = GridSearchCV(LogisticRegression(), grid, cv=3).fit(x, y)
    small = fray.ResourceConfig(memory="512MB")
    with (
        blocking.open_cluster("machine?nodes=1&cpu=2", logs=False) as cluster,
        blocking.Executor(2, cluster=cluster, resources=small) as executor,
        joblib.parallel_config(backend="fray", executor=executor),
    ):
        found = GridSearchCV(LogisticRegression(), grid, cv=3).fit(x, y)
        assert found.best_params_ == alone.best_params_
        assert found.cv_results_["mean_test_score"] == pytest.approx(alone.cv_results_["mean_test_score"])
        search = GridSearchCV(Elsewhere(os.getpid()), {"c": [0.1, 1.0]}, cv=3, refit=False, error_score="raise")
        assert len(search.fit(x, y).cv_results_["params"]) == 2
        forest = RandomForestClassifier(8, random_state=0).fit(x, y)
        assert forest.score(x, y) == RandomForestClassifier(8, random_state=0, n_jobs=1).fit(x, y).score(x, y)
