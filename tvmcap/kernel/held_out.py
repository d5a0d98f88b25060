"""How well a cost model learns what a store holds: predictions for what it was not taught.

Each candidate is predicted by a model that learnt from the other workloads, or, where there is only
one, from other candidates of it. A model ranks; a falling line a task turns its scores into times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmcap.kernel import models
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.dataset import Group
from tvmcap.kernel.gain import LEAST, falling
from tvmcap.kernel.loop_features import LOOP_NESTS
from tvmcap.kernel.ranking import hits
from tvmcap.kernel.records import Record
from tvmcap.kernel.registry import registered
from tvmcap.schedules import TEMPLATES

_FOLDS = 5


@dataclass(frozen=True, eq=False)
class Prediction:
    """Measured and predicted microseconds of the candidates of a group that ran, and hits.

    Attributes
    ----------
    group: name of the group.
    measured_us, predicted_us: float64 arrays (candidates,).
    hits, pairs: pairs in the right order, of those that count.
    best_of_1: the best time over that of the candidate that was put first.
    """

    group: str
    measured_us: Any
    predicted_us: Any
    hits: float
    pairs: int
    best_of_1: float


@dataclass(frozen=True)
class Judgement:
    """What the records of one template teach a cost model.

    Attributes
    ----------
    template: its name.
    measurements: that a model of all of them learns from.
    held_out: what a prediction was not taught: ``"workloads"`` or ``"candidates"``.
    predictions: of the groups with several candidates that ran.
    importance: (feature, share of what its splits gained), largest first, of a model of all.
    """

    template: str
    measurements: int
    held_out: str
    predictions: tuple[Prediction, ...]
    importance: tuple[tuple[str, float], ...]

    @property
    def pairwise(self) -> float | None:
        """Share of pairs in the right order; None where no pair counts."""
        total = sum(p.pairs for p in self.predictions)
        return sum(p.hits for p in self.predictions) / total if total else None

    @property
    def best_of_1(self) -> float:
        """Mean over groups of the best time over that of the candidate put first."""
        return float(np.mean([p.best_of_1 for p in self.predictions]))


def judge(records: Sequence[Record], target: Any, seed: int = 0) -> list[Judgement]:
    """Judge each template, and loop nests, with records enough to learn from.

    Parameters
    ----------
    records: of one target, failures too; those of other source of a template do not count.
    target: TVM's Target they are of.
    """
    found = []
    for template in (*registered(), *TEMPLATES, LOOP_NESTS):
        groups = models.groups(records, template, target)
        if sum(_ran(g).sum() for g in groups) >= LEAST:
            found.append(_judge(groups, template, seed))
    return found


def _judge(groups: Sequence[Group], template: Any, seed: int) -> Judgement:
    names = tuple(template.feature_names)
    workloads = dict.fromkeys(g.name.split()[0] for g in groups)
    split = _by_workload if len(workloads) > 1 else _by_candidate
    scores = {g.name: np.zeros(len(g.rows)) for g in groups}
    for taught, asked in split(groups, seed):
        model = RankModel(seed, names)
        model.pretrain(taught)
        for group, rows in asked:
            scores[group.name][rows] = model.margins(group.rows[rows])
    whole = RankModel(seed, names)
    whole.pretrain(groups)
    return Judgement(
        template.name,
        whole.pretrained,
        "workloads" if len(workloads) > 1 else "candidates",
        tuple(_prediction(g, scores[g.name]) for g in groups if _ran(g).sum() > 1),
        importance(whole),
    )


Fold = tuple[list[Group], list[tuple[Group, Any]]]
"""Groups to learn from, and (group, indices of candidates) to predict."""


def _by_workload(groups: Sequence[Group], seed: int) -> Iterable[Fold]:
    names = sorted({g.name.split()[0] for g in groups})
    shuffled = np.random.default_rng(seed).permutation(len(names))
    fold_of = {names[i]: k % _FOLDS for k, i in enumerate(shuffled)}
    for fold in range(min(_FOLDS, len(names))):
        out = [g for g in groups if fold_of[g.name.split()[0]] == fold]
        taught = [g for g in groups if fold_of[g.name.split()[0]] != fold]
        yield taught, [(g, np.arange(len(g.rows))) for g in out]


def _by_candidate(groups: Sequence[Group], seed: int) -> Iterable[Fold]:
    rng = np.random.default_rng(seed)
    folds = {g.name: rng.permutation(len(g.rows)) % _FOLDS for g in groups}
    for fold in range(_FOLDS):
        taught = [_part(g, np.flatnonzero(folds[g.name] != fold)) for g in groups]
        asked = [(g, np.flatnonzero(folds[g.name] == fold)) for g in groups]
        yield [g for g in taught if len(g.rows)], [(g, rows) for g, rows in asked if len(rows)]


def _part(group: Group, rows: Any) -> Group:
    times = tuple(group.times_us[i] for i in rows)
    return Group(group.name, group.rows[rows], times, group.workload, group.sizes)


def _ran(group: Group) -> Any:
    return np.array([t is not None for t in group.times_us], dtype=bool)


def _prediction(group: Group, scores: Any) -> Prediction:
    ran = _ran(group)
    times, own = np.array([t for t in group.times_us if t is not None], np.float64), scores[ran]
    log_times = np.log(times)
    line = log_times.mean() + falling(own, log_times) * (own - own.mean())
    hit, counted = hits(own, times)
    first = float(times.min() / times[int(np.argmax(own))])
    return Prediction(group.name, times, np.exp(line), hit, counted, first)


def importance(model: RankModel) -> tuple[tuple[str, float], ...]:
    """Return (feature, share of what the trees' splits on it gained), largest first."""
    if model.base is None:
        return ()
    gained = defaultdict[str, float](float)
    for column, gain in model.base.get_score(importance_type="total_gain").items():
        gained[model.features[int(column.removeprefix("f"))]] += float(gain)
    total = sum(gained.values()) or 1.0
    ranked = sorted(gained.items(), key=lambda pair: -pair[1])
    return tuple((name, gain / total) for name, gain in ranked)
