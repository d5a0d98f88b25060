"""Cost model of template candidates: boosted trees that rank, learnt from records and the run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.cost_model import PyCostModel

from tvmcap.kernel.features import read_knobs, template_features
from tvmcap.kernel.records import Record, canonical

_FAILED = -4.0
_ROUNDS = 80
_MIN_ROWS = 6


class RankModel:
    """Predicts log(best time / time) within a group of candidates for one task and size.

    Times are compared only within their group, so that records of other problems and sizes teach
    what makes a candidate good without saying how long it takes. Deterministic for a seed: one
    thread, exact trees.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._rows: dict[str, list[list[float]]] = defaultdict(list)
        self._times: dict[str, list[float | None]] = defaultdict(list)
        self._booster: Any = None

    def __len__(self) -> int:
        """Return how many measurements were learnt from."""
        return sum(map(len, self._times.values()))

    def add(
        self, group: str, rows: Iterable[Sequence[float]], times_us: Iterable[float | None]
    ) -> None:
        """Add measurements of a group (None: it failed); ``fit`` learns from them."""
        self._rows[group] += [[float(x) for x in row] for row in rows]
        self._times[group] += list(times_us)

    def add_records(self, records: Iterable[Record]) -> None:
        """Add records that carry features; those of another number of features are left out."""
        for r in records:
            width = next((len(rows[0]) for rows in self._rows.values() if rows), None)
            if r.features and width in (None, len(r.features)):
                self.add(group_name(r.workload_hash, r.sizes), [r.features], [r.median_us])

    def fit(self) -> None:
        """Learn anew from everything added."""
        if len(self) < _MIN_ROWS:
            return
        import xgboost

        rows = [row for group in self._rows.values() for row in group]
        targets = [y for times in self._times.values() for y in _relative(times)]
        data = xgboost.DMatrix(np.array(rows, np.float32), label=np.array(targets, np.float32))
        options = {
            "objective": "reg:squarederror",
            "tree_method": "exact",
            "max_depth": 6,
            "eta": 0.15,
            "min_child_weight": 1,
            "nthread": 1,
            "seed": self.seed,
            "verbosity": 0,
        }
        self._booster = xgboost.train(options, data, _ROUNDS)

    def scores(self, rows: Any) -> Any:
        """Return a score in (0, 1] a row, larger is better; all equal before anything is learnt."""
        if self._booster is None or len(rows) == 0:
            return np.full(len(rows), 0.5)
        import xgboost

        predicted = self._booster.predict(xgboost.DMatrix(np.asarray(rows, np.float32)))
        return np.exp(np.clip(predicted.astype(np.float64), -20.0, 0.0))

    def save(self, path: str) -> None:
        """Write the measurements learnt from as JSON."""
        Path(path).write_text(json.dumps({"rows": self._rows, "times": self._times}))

    def load(self, path: str) -> None:
        """Read what ``save`` wrote, and learn from it."""
        data = json.loads(Path(path).read_text())
        for group, rows in data["rows"].items():
            self.add(group, rows, data["times"][group])
        self.fit()


def group_name(workload_hash: str, sizes: dict[str, int]) -> str:
    """Name of the group of candidates that are compared with each other."""
    return f"{workload_hash} {canonical(sizes)}"


def _relative(times: Sequence[float | None]) -> list[float]:
    best = min((t for t in times if t is not None), default=1.0)
    return [_FAILED if t is None else max(_FAILED + 1, float(np.log(best / t))) for t in times]


@derived_object
class KnobCostModel(PyCostModel):  # type: ignore[misc]
    """A RankModel behind MetaSchedule's interface; contexts are known by their task's name.

    Parameters
    ----------
    model: what learns and ranks.
    template, target: whose knobs the candidates carry.
    problems: task name to (group, problem at its sizes).
    """

    def __init__(
        self, model: RankModel, template: Any, target: Any, problems: dict[str, tuple[str, Any]]
    ) -> None:
        super().__init__()
        self.model, self.template, self.target, self.problems = model, template, target, problems

    def load(self, path: str) -> None:
        """Read measurements."""
        self.model.load(path)

    def save(self, path: str) -> None:
        """Write measurements."""
        self.model.save(path)

    def _features(self, context: Any, candidates: Sequence[Any]) -> Any:
        knobs = [self.template.knobs_from_json(read_knobs(c.sch)) for c in candidates]
        return template_features(
            self.template, self.problems[str(context.task_name)][1], knobs, self.target
        )

    def update(self, context: Any, candidates: Sequence[Any], results: Sequence[Any]) -> None:
        """Learn from measured candidates."""
        times = [
            None if r.run_secs is None else float(np.median([float(s) for s in r.run_secs])) * 1e6
            for r in results
        ]
        self.model.add(
            self.problems[str(context.task_name)][0], self._features(context, candidates), times
        )
        self.model.fit()

    def predict(self, context: Any, candidates: Sequence[Any]) -> Any:
        """Return a score in (0, 1] a candidate."""
        return self.model.scores(self._features(context, candidates))
