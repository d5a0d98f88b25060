"""Which groups of candidates are learnt from, and which are held out.

Held out are whole (K, N) pairs, a third of them, and one epilogue where records have several; never
M alone. Each seed holds out others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tvmcap.kernel.dataset import Group

EPILOGUES = Path(__file__).with_name("epilogues.json")
"""Names of the epilogues of the records that ship, by digest; cost_model_data.py writes them."""
HELD_OUT = 3
"""One in so many (K, N) pairs is held out."""


def pair_of(group: Group) -> tuple[Any, ...]:
    """Return what is held out together: K and N, the columns of a row kernel, a loop nest."""
    work = group.workload
    return tuple(work[name] for name in ("k", "n", "columns", "func") if name in work)


def epilogue_of(group: Group, names: Mapping[str, str]) -> str:
    """Return the name of a group's epilogue; those without one count as one."""
    return names.get(str(group.workload.get("digest")), "unnamed")


def split(
    groups: Sequence[Group], names: Mapping[str, str], seed: int
) -> tuple[list[Group], list[Group]]:
    """Return the groups to learn from, and those held out."""
    rng = np.random.default_rng(seed)
    found = sorted({pair_of(g) for g in groups}, key=str)
    chosen = rng.permutation(len(found))[: -(-len(found) // HELD_OUT)]
    held = {found[i] for i in chosen}
    epilogues = sorted({epilogue_of(g, names) for g in groups})
    out = epilogues[int(rng.integers(len(epilogues)))] if len(epilogues) > 1 else None
    test = [g for g in groups if pair_of(g) in held or epilogue_of(g, names) == out]
    tested = set(map(id, test))
    return [g for g in groups if id(g) not in tested], [shuffled(g, rng) for g in test]


def in_random_order(groups: Sequence[Group], seed: int) -> list[Group]:
    """Return groups with their candidates in random order."""
    rng = np.random.default_rng(seed)
    return [shuffled(g, rng) for g in groups]


def shuffled(group: Group, rng: np.random.Generator) -> Group:
    """Return a group in random order: stores have the fastest first, whom ties would favour."""
    order = rng.permutation(len(group.times_us))
    estimates = group.estimates_us
    return replace(
        group,
        rows=group.rows[order],
        times_us=tuple(group.times_us[i] for i in order),
        knobs=tuple(group.knobs[i] for i in order) if group.knobs else (),
        estimates_us=None if estimates is None else tuple(estimates[i] for i in order),
    )
