"""Lazy: what `build` returns without example inputs.

The first call captures; a size that later differs becomes free.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvmcap.base.config import Config, Dim
from tvmcap.base.errors import InputError, LibraryError
from tvmcap.compiled import Compiled

logger = logging.getLogger("tvmcap")


class Lazy:
    """A library compiled at its first call, and once more when a dimension turns out to vary.

    Attributes
    ----------
    config: the options; ``dynamic`` grows by the dimensions seen to vary.
    compiles: one line a compile: why it happened, and at which sizes.
    """

    def __init__(self, fn: Any, config: Config) -> None:
        self.fn, self.config = fn, config
        self.compiles: list[str] = []
        self._compiled: Compiled | None = None
        self._first: dict[str, _Spec] = {}

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run, compiling first where this call needs it."""
        if self._compiled is None:
            self._first = dict(_specs(self.fn, args, kwargs))
            self._compile(args, kwargs, "first call")
        assert self._compiled is not None
        try:
            return self._compiled(*args, out=out, **kwargs)
        except InputError:
            varying = self._varying(args, kwargs)
            if not varying:
                raise
            self.config = replace(self.config, dynamic=_merge(self.config.dynamic, varying))
            names = ", ".join(f"{name}[{axis}]" for name, axes in varying.items() for axis in axes)
            self._compile(args, kwargs, f"{names} varies and becomes symbolic")
            return self._compiled(*args, out=out, **kwargs)

    def _compile(self, args: Any, kwargs: Any, why: str) -> None:
        from tvmcap.build import compile_once

        specs = _specs(self.fn, args, kwargs)
        sizes = ", ".join(f"{name}{list(shape)}" for name, (_, shape) in specs)
        self.compiles.append(f"{why}: {sizes}")
        logger.info("compile %d: %s", len(self.compiles), self.compiles[-1])
        self._compiled = compile_once(self.fn, args, dict(kwargs), self.config)

    def _varying(self, args: Any, kwargs: Any) -> dict[str, dict[int, str]]:
        """Find the dimensions that differ from the first call and are not free yet.

        Dimensions that were equal and still are share a name.
        """
        found: dict[str, dict[int, str]] = {}
        groups: dict[tuple[int, int], str] = {}
        for name, (dtype, shape) in _specs(self.fn, args, kwargs):
            old_dtype, old = self._first.get(name, (dtype, shape))
            if dtype != old_dtype or len(old) != len(shape):
                return {}
            for axis, (before, now) in enumerate(zip(old, shape, strict=True)):
                if before != now and axis not in (self.config.dynamic or {}).get(name, {}):
                    known = len(self.config.dynamic or {}) + len(groups)
                    found.setdefault(name, {})[axis] = groups.setdefault((before, now), f"d{known}")
        return found

    @property
    def compiled(self) -> Compiled:
        """The library of the latest compile; raises LibraryError before the first call."""
        if self._compiled is None:
            raise LibraryError(
                "nothing is compiled yet: call it once, or pass example inputs to build(fn, args)"
            )
        return self._compiled

    def export(self, path: Any) -> Path:
        """Write the library to ``path``; raises LibraryError before the first call."""
        return self.compiled.export(path)

    def explain(self) -> str:
        """List the compiles, then explain the latest library."""
        text = "\n".join(f"compile {i}: {line}" for i, line in enumerate(self.compiles, 1))
        return f"{len(self.compiles)} compiles\n{text}\n{self.compiled.explain()}"

    def __getattr__(self, name: str) -> Any:
        """Everything else is the library's."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.compiled, name)


_Spec = tuple[str, tuple[int, ...]]


def _specs(fn: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, _Spec]]:
    """Name, dtype and shape of every tensor among the arguments, nested ones with dotted names."""
    from tvmcap.capture.structure import bind, describe

    call = bind(fn, list(args), dict(kwargs))
    for name, value in zip(call.names, call.values, strict=True):
        leaves: list[tuple[str, Any]] = []
        describe(value, name, leaves)
        yield from ((leaf, (str(tensor.dtype), tuple(tensor.shape))) for leaf, tensor in leaves)


def _merge(old: Mapping[Any, Any] | None, new: Mapping[str, Mapping[int, str]]) -> dict[Any, Any]:
    merged: dict[Any, dict[int, str | Dim]] = {k: dict(v) for k, v in (old or {}).items()}
    for name, axes in new.items():
        merged.setdefault(name, {}).update(axes)
    return merged
