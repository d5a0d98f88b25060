"""Search replayed on records: the loop of ``tvmcap.tune`` with times looked up, not measured.

The space is the settings that were recorded; what the best of them takes is known, so that a search
of few trials can be compared with an exhaustive one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cost_model_metrics import EXHAUSTIVE
from tvm.script import tirx as T

from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.dataset import Group
from tvmcap.kernel.measure import Measurement
from tvmcap.kernel.records import RecordStore, TaskKey, canonical
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.tasks import Task
from tvmcap.kernel.template import Template, source_hash
from tvmcap.kernel.template_search import TemplateSession

TRIALS = (8, 16, 32)
"""Trials after which a search is judged."""
SHAPES = 12
"""Shapes that a seed searches at most."""
BATCH = 8
"""Candidates between two updates of the model: the tuner's, for one task and 32 trials."""
_SPREAD = 0.005
"""Half of p10 to p90 over the median, where times are looked up: as measured on a GPU."""


@T.prim_func(s_tir=True)
def _stand_in(x: T.Buffer((1,), "float32")) -> None:
    with T.sblock("root"):
        T.evaluate(x[0])


def replayed(groups: Sequence[Group], template: Any, seed: int) -> list[Group]:
    """Return the groups to search in: of a template, all of many candidates ran; drawn, if many."""
    if not isinstance(template, Template) or template.recall is None:
        return []
    found = [
        g
        for g in groups
        if g.estimates_us is not None and len(g.knobs) >= EXHAUSTIVE and None not in g.times_us
    ]
    order = np.random.default_rng(seed).permutation(len(found))
    return [found[i] for i in order[:SHAPES]]


def replay(
    group: Group, template: Template, model: RankModel, target: Any, seed: int
) -> list[float]:
    """Return the times of what a search measures, in order.

    ``model`` is what the search starts with; it stays as it is.
    """
    times = dict(zip(map(template.knobs_to_json, group.knobs), group.times_us, strict=True))
    session = _session(group, template, model, target, seed)
    found: list[float] = []
    while len(found) < max(TRIALS):
        proposals = session.propose(min(BATCH, max(TRIALS) - len(found)))
        if not proposals:
            break
        results = []
        for proposal in proposals:
            us = times[canonical(proposal.knobs)] or math.inf
            results.append(Measurement(us, us * (1 - _SPREAD), us * (1 + _SPREAD), 1))
            session.record(proposal, results[-1])
            found.append(us)
        session.notify(proposals, results)
    best = min(t for t in group.times_us if t is not None)
    return [best / us for us in found]


def drawn(group: Group, seed: int) -> list[float]:
    """Return what ``replay`` does, of candidates drawn at random."""
    times = np.array(group.times_us, np.float64)
    order = np.random.default_rng(seed).permutation(len(times))[: max(TRIALS)]
    return [float(ratio) for ratio in times.min() / times[order]]


def search_metrics(runs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return ``search_N``, the geometric mean of the best of N trials, and the mean of all trials.

    ``runs`` have, a shape, the best time of all over that of each trial. A search that ends before
    N trials counts with those it made.
    """
    found = {
        f"search_{n}": float(np.exp(np.mean([np.log(max(run[:n])) for run in runs])))
        for n in TRIALS
    }
    counts = [len(run) for run in runs]
    return {**found, "search_trials": float(np.mean(counts)), "search_shapes": float(len(runs))}


def _session(
    group: Group, template: Template, model: RankModel, target: Any, seed: int
) -> TemplateSession:
    """Return the search for a group's problem among its recorded settings, without history."""
    problem = template.recall(group.workload, group.sizes) if template.recall else None
    points, first = list(group.knobs), int(np.argmin(group.estimates_us or ()))
    own = replace(
        template,
        match=lambda func, target: problem,
        space=lambda problem, target: points,
        default=lambda problem, target: points[first],
    )
    key = TaskKey("template", group.name.split(" ")[0], template.name, source_hash(template))
    func = _stand_in.with_attr("global_symbol", "main")
    task = Task("replayed", func, 1, own, problem, (), key, dict(group.workload))
    nowhere = RecordStore(Path("/nonexistent"))
    start = replace(model, _top=None, _groups={}, _seen=0)
    return TemplateSession(task, {}, target, Stores((), nowhere), seed, start)
