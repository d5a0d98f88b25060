"""Lazy: what `build` returns without example inputs.

The first call captures; a size that later differs becomes free.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
        self._given = dict(config.dynamic or {})
        self._compiled: Compiled | None = None
        self._seen: list[_Call] = []

    def __repr__(self) -> str:
        made = "not compiled yet" if self._compiled is None else repr(self._compiled)
        return f"<{getattr(self.fn, '__qualname__', type(self.fn).__qualname__)}: {made}>"

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run, compiling first where this call needs it."""
        if self._compiled is None:
            self._compile(args, kwargs, self.config, _Call.of(self.fn, args, kwargs), "first call")
        assert self._compiled is not None
        try:
            return self._compiled(*args, out=out, **kwargs)
        except InputError:
            call = _Call.of(self.fn, args, kwargs)
            dynamic = self._derive([*self._seen, call])
            if dynamic is None or dynamic == dict(self.config.dynamic or {}):
                raise
            config = replace(self.config, dynamic=dynamic)
            new = [
                f"{name}[{axis}]"
                for name, axes in dynamic.items()
                for axis, symbol in axes.items()
                if (self.config.dynamic or {}).get(name, {}).get(axis) != symbol
            ]
            why = f"{', '.join(new)} varies and becomes symbolic"
            self._compile(args, kwargs, config, call, why)
            return self._compiled(*args, out=out, **kwargs)

    def _compile(self, args: Any, kwargs: Any, config: Config, call: _Call, why: str) -> None:
        """Compile for one call; nothing changes where that fails."""
        from tvmcap.build import compile_once

        sizes = ", ".join(f"{name}{list(shape)}" for name, (_, shape) in call.tensors.items())
        logger.info("compile %d: %s: %s", len(self.compiles) + 1, why, sizes)
        self._compiled = compile_once(self.fn, args, dict(kwargs), config)
        self.config = config
        self.compiles.append(f"{why}: {sizes}")
        self._seen.append(call)

    def _derive(self, calls: list[_Call]) -> dict[Any, dict[int, str | Dim]] | None:
        """Name the dimensions that differ among calls; those equal in every call share a name.

        None where calls differ in more than sizes: in dtypes, ranks or the values of constants.
        """
        if any(call.kind != calls[0].kind for call in calls):
            return None
        dynamic: dict[Any, dict[int, str | Dim]] = {k: dict(v) for k, v in self._given.items()}
        names = list(calls[0].arguments)
        given = {names[k] if isinstance(k, int) else k: set(v) for k, v in self._given.items()}
        groups: dict[tuple[int, ...], str] = {}
        for name, (_, shape) in calls[0].tensors.items():
            for axis in range(len(shape)):
                sizes = tuple(call.tensors[name][1][axis] for call in calls)
                if len(set(sizes)) > 1 and axis not in given.get(name, ()):
                    symbol = groups.setdefault(sizes, f"d{len(groups)}")
                    dynamic.setdefault(name, {})[axis] = symbol
        return dynamic

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


@dataclass(frozen=True)
class _Call:
    """What matters of the arguments of one call.

    Attributes
    ----------
    arguments: names of the arguments.
    tensors: dotted name to dtype and shape.
    constants: structure and values of everything else.
    """

    arguments: tuple[str, ...]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    constants: str

    @staticmethod
    def of(fn: Any, args: Any, kwargs: Mapping[str, Any]) -> _Call:
        """Describe the arguments of a call."""
        from tvmcap.capture.structure import bind, describe

        call = bind(fn, list(args), dict(kwargs))
        leaves: list[tuple[str, Any]] = []
        trees = [
            describe(value, name, leaves)
            for name, value in zip(call.names, call.values, strict=True)
        ]
        tensors = {name: (str(t.dtype), tuple(t.shape)) for name, t in leaves}
        return _Call(tuple(call.names), tensors, repr(trees))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Everything but sizes: what one library cannot serve two of."""
        ranks = {name: (dtype, len(shape)) for name, (dtype, shape) in self.tensors.items()}
        return self.arguments, ranks, self.constants
