"""Counts: what the calls of one thread took beside kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Counts:
    """Of one thread, since it first called the library.

    Attributes
    ----------
    copies: inputs copied because they were not contiguous or not aligned, in all threads.
    arena_bytes: memory of intermediates.
    growths: how often that memory, or an output kept for ``run``, had to be made larger.
    captures, replays, updates, duplicates, evictions: CUDA graphs recorded, launched, updated for
        other addresses, made executable once more for addresses that came back, and dropped for
        the limit of bytes.
    graphs, graph_bytes: those alive.
    fallbacks: how often a call could not be replayed, by the reason.
    """

    copies: int = 0
    arena_bytes: int = 0
    growths: int = 0
    captures: int = 0
    replays: int = 0
    updates: int = 0
    duplicates: int = 0
    evictions: int = 0
    graphs: int = 0
    graph_bytes: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)


def count(context: Any, copies: int) -> Counts:
    """Read the counters of a context."""
    found = Counts(
        copies=copies,
        arena_bytes=context.arena.nbytes,
        growths=context.arena.growths + context.bound.growths,
    )
    graphs = context.graphs
    if graphs is None:
        return found
    return replace(
        found,
        captures=graphs.captures,
        replays=graphs.replays,
        updates=graphs.updates,
        duplicates=graphs.duplicates,
        evictions=graphs.evictions,
        graphs=len(graphs),
        graph_bytes=graphs.nbytes,
        fallbacks=dict(graphs.fallbacks),
    )
