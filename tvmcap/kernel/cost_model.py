"""Cost model: boosted trees that rank candidates, learnt before the run and refined in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.cost_model import PyCostModel

from tvmcap.kernel.dataset import Group
from tvmcap.kernel.features import read_knobs, template_features

PRIOR = "log_estimate_us"
"""Feature that is the logarithm of a template's own estimate: trees correct it, and where there is
nothing to learn from, it ranks alone."""
OBJECTIVES = ("rank:pairwise", "rank:ndcg", "reg:squarederror")
_PRIOR_SCALE = {"rank:pairwise": 8.0, "rank:ndcg": 8.0, "reg:squarederror": 1.0}
_FAILED = -4.0
_ROUNDS, _REFINING_ROUNDS = 100, 30
_MANY, _ROUNDS_OF_MANY = 1000, 300  # measurements from which on more trees do not overfit
_MIN_ROWS = 6
_GROWTH = 1.1
_OPTIONS = {
    "tree_method": "hist",
    "max_depth": 3,
    "eta": 0.1,
    "subsample": 0.8,
    "colsample_bytree": 0.6,
    "nthread": 1,
    "verbosity": 0,
}
_RANKING: dict[str, dict[str, Any]] = {
    "rank:pairwise": {"lambdarank_pair_method": "mean", "lambdarank_num_pair_per_sample": 8},
    # best time over time is no count of stars: 2**label is not meant
    "rank:ndcg": {
        "lambdarank_pair_method": "topk",
        "lambdarank_num_pair_per_sample": 32,
        "ndcg_exp_gain": False,
    },
}


@dataclass(eq=False)
class RankModel:
    """Ranks the candidates of one task at one size; larger is better.

    Times are compared only within their group, so that records of other problems and sizes teach
    what makes a candidate good without saying how long it takes. ``pretrain`` learns the trees that
    are kept; ``add`` and ``fit`` put a few on top of them for what this run measured, which thus
    decides where the two differ, and costs the same however much was learnt before. Deterministic
    for a seed: one thread.

    Attributes
    ----------
    features: names of the columns; with ``PRIOR`` among them its estimate is where trees start.
    objective: one of ``OBJECTIVES``.
    pretrained: measurements that ``pretrain`` learnt from; ``source`` says where they are from.
    """

    seed: int = 0
    features: tuple[str, ...] = ()
    objective: str = OBJECTIVES[0]
    pretrained: int = 0
    source: str = ""
    base: Any = None
    _top: Any = None
    _groups: dict[str, tuple[list[Any], list[float | None]]] = field(default_factory=dict)
    _seen: int = 0

    def __len__(self) -> int:
        """Return how many measurements were learnt from or added."""
        return self.pretrained + self._added()

    def _added(self) -> int:
        return sum(len(times) for _, times in self._groups.values())

    @property
    def learnt(self) -> bool:
        """Whether there are trees."""
        return self.base is not None or self._top is not None

    def snapshot(self) -> RankModel:
        """Return a model that ranks as this one does now, whatever this one learns later."""
        found = RankModel(self.seed, self.features, self.objective, self.pretrained, self.source)
        found.base, found._top = self.base, self._top
        return found

    def pretrain(self, groups: Sequence[Group], source: str = "") -> None:
        """Learn the trees that are kept from measured groups; too few teach nothing."""
        data = [(g.rows, list(g.times_us)) for g in groups]
        total = sum(len(times) for _, times in data)
        if total >= _MIN_ROWS:
            rounds = _ROUNDS if total < _MANY else _ROUNDS_OF_MANY
            self.base = self._train(data, None, rounds)
            self.pretrained, self.source, self._top, self._seen = total, source, None, 0

    def add(
        self, group: str, rows: Iterable[Sequence[float]], times_us: Iterable[float | None]
    ) -> None:
        """Add measurements of a group (None: it failed); ``fit`` learns from them."""
        known = self._groups.setdefault(group, ([], []))
        known[0].extend(np.asarray(row, np.float32) for row in rows)
        known[1].extend(times_us)

    def fit(self) -> None:
        """Learn from what was added, as soon as that is a tenth more than at the last time."""
        added = self._added()
        if added < _MIN_ROWS or added < _GROWTH * self._seen:
            return
        data = [(np.array(rows), times) for rows, times in self._groups.values()]
        rounds = _ROUNDS if self.base is None else _REFINING_ROUNDS
        self._top, self._seen = self._train(data, self.base, rounds), added

    def _train(self, data: list[tuple[Any, list[float | None]]], base: Any, rounds: int) -> Any:
        import xgboost

        rows = np.concatenate([rows for rows, _ in data]).astype(np.float32)
        labels = np.concatenate([self._labels(times) for _, times in data])
        matrix = xgboost.DMatrix(rows, label=labels)
        options = {**_OPTIONS, "objective": self.objective, "seed": self.seed}
        if self.objective in _RANKING:
            options.update(_RANKING[self.objective])
            matrix.set_group([len(times) for _, times in data])
        # few pairs have little curvature: let them split all the same
        options["min_child_weight"] = min(1.0, len(rows) / 200)
        matrix.set_base_margin(self._margins(rows, base))
        return xgboost.train(options, matrix, rounds)

    def _labels(self, times: Sequence[float | None]) -> Any:
        """Best time over time, its logarithm for a regression; a failure has the least."""
        best = min((t for t in times if t is not None), default=1.0)
        ratios = np.array([0.0 if t is None else best / t for t in times], np.float32)
        if self.objective in _RANKING:
            return ratios
        with np.errstate(divide="ignore"):
            return np.maximum(np.log(ratios), _FAILED)

    def _start(self, rows: Any) -> Any:
        """What trees start from: the estimate, where it is a feature."""
        if PRIOR not in self.features:
            return np.zeros(len(rows), np.float32)
        return -_PRIOR_SCALE[self.objective] * rows[:, self.features.index(PRIOR)]

    def _margins(self, rows: Any, *boosters: Any) -> Any:
        import xgboost

        margins = self._start(rows)
        for booster in boosters:
            if booster is not None:
                matrix = xgboost.DMatrix(rows, base_margin=margins)
                margins = booster.predict(matrix, output_margin=True)
        return margins

    def margins(self, rows: Any) -> Any:
        """Return what orders candidates of one group, of any scale and offset; larger is better."""
        rows = np.asarray(rows, np.float32)
        if len(rows) == 0:
            return np.zeros(0)
        if not self.learnt:
            known = PRIOR in self.features
            return -rows[:, self.features.index(PRIOR)] if known else np.zeros(len(rows))
        return np.asarray(self._margins(rows, self.base, self._top), np.float64)

    def scores(self, rows: Any) -> Any:
        """Return a score in (0, 1) a row, larger is better; all equal with nothing to go by."""
        margins = self.margins(rows)
        # an estimate puts all candidates of a task far from 0
        offset = np.median(margins) if PRIOR in self.features and len(margins) else 0.0
        return 1.0 / (1.0 + np.exp(-np.clip(margins - offset, -30.0, 30.0)))

    def save(self, path: str) -> None:
        """Write the measurements of this run as JSON (``models.save`` writes what is kept)."""
        data = {
            name: [[[float(x) for x in row] for row in rows], times]
            for name, (rows, times) in self._groups.items()
        }
        Path(path).write_text(json.dumps(data))

    def load(self, path: str) -> None:
        """Read what ``save`` wrote, and learn from it."""
        for group, (rows, times) in json.loads(Path(path).read_text()).items():
            self.add(group, rows, times)
        self.fit()


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
        group = self.problems[str(context.task_name)][0]
        self.model.add(group, self._features(context, candidates), times_us(results))
        self.model.fit()

    def predict(self, context: Any, candidates: Sequence[Any]) -> Any:
        """Return a score in (0, 1) a candidate."""
        return self.model.scores(self._features(context, candidates))


def times_us(results: Sequence[Any]) -> list[float | None]:
    """Return the microseconds of MetaSchedule's results, None for a failure."""
    return [
        None if r.run_secs is None else float(np.median([float(s) for s in r.run_secs])) * 1e6
        for r in results
    ]
