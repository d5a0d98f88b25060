"""What a cost model learns from: measured candidates of a template by task and size, as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmcap.kernel.features import template_features
from tvmcap.kernel.records import Record, canonical, digest
from tvmcap.kernel.template import Template, source_hash


@dataclass(frozen=True, eq=False)
class Group:
    """Candidates that are compared with each other: one task at one size.

    Attributes
    ----------
    name: of the group (``group_name``).
    rows: features, (candidates, features).
    times_us: microseconds of each, None for a failure.
    workload, sizes: of the records.
    knobs: of each candidate; the canonical text of its trace for a loop nest.
    estimates_us: the template's estimate of each; None where it has none.
    """

    name: str
    rows: Any
    times_us: tuple[float | None, ...]
    workload: Mapping[str, Any]
    sizes: Mapping[str, int]
    knobs: tuple[Any, ...] = ()
    estimates_us: tuple[float, ...] | None = None


def group_name(workload_hash: str, sizes: Mapping[str, int]) -> str:
    """Name of the group of candidates that are compared with each other."""
    return f"{workload_hash} {canonical(dict(sizes))}"


def of_template(
    records: Iterable[Record], template: Template, target: Any, any_source: bool = False
) -> list[Group]:
    """Return the groups of a template's records, by name; of two timings the later counts.

    Features are computed from what the record holds where the template can (``recall``), else they
    are those that the record holds. ``any_source`` admits records of an earlier source of the
    template, as far as today's knobs can tell them.
    """
    mine = source_hash(template)
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        current = record.template_hash == mine
        if record.template == template.name and (current or any_source):
            name = group_name(record.workload_hash, record.sizes)
            found.setdefault(name, {})[record.candidate] = record
    groups = (_group(n, _in_order(r), template, target, mine) for n, r in found.items())
    return sorted((g for g in groups if g is not None), key=lambda g: g.name)


def of_traces(records: Iterable[Record], width: int, version: float) -> list[Group]:
    """Return the groups of loop nests' records that carry ``width`` features of a version."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        row = record.features or []
        if record.kind == "trace" and len(row) == width and row[0] == version:
            name = group_name(record.workload_hash, record.sizes)
            found.setdefault(name, {})[record.candidate] = record
    groups = []
    for name, known in sorted(found.items()):
        own = _in_order(known)
        rows = np.array([r.features for r in own], np.float32)
        traces = tuple(r.candidate for r in own)
        groups.append(Group(name, rows, _times(own), own[0].workload, own[0].sizes, traces))
    return groups


def _in_order(found: Mapping[str, Record]) -> list[Record]:
    """Return the records of candidates in an order that does not depend on how they were stored."""
    return [found[candidate] for candidate in sorted(found)]


def _group(
    name: str, records: list[Record], template: Template, target: Any, mine: str
) -> Group | None:
    first = records[0]
    if template.recall is None:
        width = len(template.feature_names)
        known = [r for r in records if r.template_hash == mine and len(r.features or ()) == width]
        if not known:
            return None
        rows = np.array([r.features for r in known], np.float32)
        return Group(name, rows, _times(known), first.workload, first.sizes)
    problem = template.recall(first.workload, first.sizes)
    pairs = [(r, knobs) for r in records if (knobs := _knobs(template, r)) is not None]
    if problem is None or not pairs:
        return None
    known, points = [r for r, _ in pairs], [knobs for _, knobs in pairs]
    rows = template_features(template, problem, points, target)
    estimate = template.estimate
    estimates = None if estimate is None else tuple(estimate(problem, points, target))
    return Group(name, rows, _times(known), first.workload, first.sizes, tuple(points), estimates)


def _times(records: list[Record]) -> tuple[float | None, ...]:
    return tuple(r.median_us for r in records)


def _knobs(template: Template, record: Record) -> Any:
    """Return a record's knobs, those it does not know yet at their defaults; None for others."""
    data, names = record.knobs or {}, {f.name for f in dataclasses.fields(template.knobs)}
    try:
        return template.knobs(**data) if set(data) <= names else None
    except TypeError:  # a knob without a default that the record does not have
        return None


def data_hash(groups: Iterable[Group]) -> str:
    """Return the digest of what was measured, whatever the order and the features."""
    lines = []
    for g in groups:
        known = (k if isinstance(k, str) else canonical(dataclasses.asdict(k)) for k in g.knobs)
        labels = list(known) or g.rows.tolist()
        lines += [[g.name, label, us] for label, us in zip(labels, g.times_us, strict=True)]
    return digest(sorted(lines, key=canonical))
