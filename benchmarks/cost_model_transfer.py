"""What records of one dtype, or processor, tell of another, with none, a few or all of its own.

Source are bfloat16's records and those for x86-64-v3; own are float16's and this processor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from cost_model_metrics import evaluated
from cost_model_split import pair_of, shuffled

from tvmcap.kernel import models
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.dataset import Group

SOURCE, OWN = "bfloat16", "float16"
"""Dtypes of the operands: what is learnt from, and what is transferred to."""
SHARE = 0.085
"""Of the own records, the few: 7 to 10%."""


def by_dtype(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Return the groups of ``SOURCE`` and of ``OWN``."""
    source, own = ([g for g in groups if _dtype(g) == d] for d in (SOURCE, OWN))
    return source, own


def transfer(
    source: Sequence[Group], own: Sequence[Group], features: Sequence[str], seed: int
) -> dict[str, Any] | None:
    """Return the metrics on half the (K, N) pairs, or tasks, of ``own``; None without both.

    Rows: ``none`` (``source`` alone), ``few`` and ``all`` (refined on a few, or all, of the other
    pairs' records), ``few_alone`` and ``all_alone`` (without ``source``). What is tested on is not
    in the source either.
    """
    pairs = sorted({pair_of(g) for g in own})
    if not source or len(pairs) < 2:
        return None
    rng = np.random.default_rng(seed)
    held = {pairs[i] for i in rng.permutation(len(pairs))[: len(pairs) // 2]}
    test = [shuffled(g, rng) for g in own if pair_of(g) in held]
    rest = [g for g in own if pair_of(g) not in held]
    tested = {g.name for g in test}
    source = [g for g in source if g.name not in tested]
    count = round(SHARE * sum(len(g.rows) for g in own))
    few = draw(rest, count, rng)
    names = tuple(features)
    found: dict[str, dict[str, float]] = {}
    for name, taught in (("none", []), ("few", few), ("all", rest)):
        found[name] = evaluated(models.transfer(source, taught, names, seed), test)
    for name, taught in (("few_alone", few), ("all_alone", rest)):
        model = RankModel(seed, names)
        model.pretrain(taught)
        found[name] = evaluated(model, test)
    for name, taught in (("none", []), ("few", few), ("few_alone", few)):
        found[name]["records"] = float(sum(len(g.rows) for g in taught))
    return found


def draw(groups: Sequence[Group], count: int, rng: Any) -> list[Group]:
    """Return ``count`` candidates drawn from groups, as groups."""
    owner = np.repeat(np.arange(len(groups)), [len(g.rows) for g in groups])
    inside = np.concatenate([np.arange(len(g.rows)) for g in groups])
    chosen = np.sort(rng.permutation(len(owner))[:count])
    parts = [(g, inside[chosen[owner[chosen] == i]]) for i, g in enumerate(groups)]
    return [
        replace(g, rows=g.rows[at], times_us=tuple(g.times_us[i] for i in at))
        for g, at in parts
        if len(at)
    ]


def _dtype(group: Group) -> str:
    return str(group.workload.get("dtypes", [""])[0])
