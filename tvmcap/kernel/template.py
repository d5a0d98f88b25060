"""Template: a hand-written search space for one family of kernels; knobs as canonical JSON."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np

from tvmcap.base.errors import RecordError


class Problem(Protocol):
    """What a template read off a PrimFunc it matched; a frozen dataclass of its own."""

    @property
    def rows(self) -> Any:
        """Extent (int, or a PrimExpr of symbolic dimensions) by which knobs may be chosen."""

    def key(self) -> dict[str, Any]:
        """Return plain JSON that identifies the workload but for symbolic sizes."""

    def flops(self, sizes: Mapping[str, int]) -> float:
        """Return the floating-point operations of one run at the given sizes."""

    def bytes(self, sizes: Mapping[str, int]) -> float:
        """Return the bytes that one run must at least read and write at the given sizes."""


@dataclass(frozen=True)
class Template:
    """A family of kernels: what it fits, what can be chosen, and how a choice is lowered.

    Attributes
    ----------
    name: identifies the template in records.
    knobs: frozen dataclass whose fields are all int, bool or str.
    match: ``(func, target)`` to the problem, or None where the template does not fit.
    space: every setting of the knobs that can run, for ``(problem, target)``.
    default: the setting used where no record exists.
    lower: ``(func, problem, knobs, target)`` to the scheduled PrimFunc with the same parameters.
        Its attribute ``tvmcap.trailing`` says how many dimensions of the first result, the last
        ones, are not of ``problem.rows``: 1 where not given.
    features: ``(problem, knobs, target)`` to a float32 array of shape (number of knobs, number of
        features).
    feature_names: one name a column of ``features``.
    ranges: the defaults of a symbolic ``problem.rows`` as (largest rows or None, knobs); None:
        ``default`` for all.
    estimate: ``(problem, knobs, target)`` to rough microseconds of each setting, by which tuning
        draws up its short list; None: there is no such order.
    refuse: ``(func, target)`` to words that say why a kernel of the family is not served; None for
        one that is, or that is none of the family.
    modules: names of the modules whose source, with that of ``lower``, decides what a setting
        means.
    """

    name: str
    knobs: type
    match: Callable[[Any, Any], Any]
    space: Callable[[Any, Any], list[Any]]
    default: Callable[[Any, Any], Any]
    lower: Callable[[Any, Any, Any, Any], Any]
    features: Callable[[Any, Sequence[Any], Any], np.ndarray[Any, np.dtype[np.float32]]]
    feature_names: tuple[str, ...]
    ranges: Callable[[Any, Any], list[tuple[int | None, Any]]] | None = None
    estimate: Callable[[Any, Sequence[Any], Any], Sequence[float]] | None = None
    refuse: Callable[[Any, Any], str | None] | None = None
    modules: tuple[str, ...] = ()

    def knobs_to_json(self, knobs: Any) -> str:
        """Return the canonical JSON text of a setting: sorted keys, no spaces."""
        return json.dumps(asdict(knobs), sort_keys=True, separators=(",", ":"))

    def knobs_from_json(self, text: str) -> Any:
        """Read what ``knobs_to_json`` wrote; raises RecordError for other fields or kinds."""
        try:
            data = json.loads(text)
            kinds = {f.name: str(getattr(f.type, "__name__", f.type)) for f in fields(self.knobs)}
            if {name: type(value).__name__ for name, value in data.items()} != kinds:
                raise TypeError(f"expected the fields {kinds}")
            return self.knobs(**data)
        except (ValueError, TypeError, AttributeError) as e:
            raise RecordError(
                f"{text!r} is no setting of the template {self.name!r} ({e}); tune again"
            ) from e


def source_hash(template: Template) -> str:
    """Return the sha256 of the source of the template's modules; records carry it."""
    digest = hashlib.sha256()
    for name in sorted({template.lower.__module__, *template.modules}):
        digest.update(inspect.getsource(importlib.import_module(name)).encode())
    return digest.hexdigest()
