"""Bound: tensors that a thread binds once by name, for calls that then take no argument."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any

from tvmcap.base.errors import InputError
from tvmcap.base.signature import Signature
from tvmcap.runtime.binding import Plan

Ready = tuple[Plan, Sequence[Any], Sequence[Any], "tuple[int, ...] | None"]
"""Plan, inputs, outputs and the addresses of both, where the call may be recorded."""
_GROWTH = 2


class Bound:
    """The tensors bound in one thread, and the outputs that it keeps for the rest.

    Attributes
    ----------
    inputs, outputs: what is bound, by position; None where nothing is.
    ready: what runs what is bound, all of it checked; None after ``bind``, until the next run.
    results: of the last run.
    growths: how often an output that is kept here was made larger.
    """

    def __init__(self, signature: Signature) -> None:
        self._names = {spec.name: i for i, spec in enumerate(signature.inputs)}
        self._out_names = {spec.name: i for i, spec in enumerate(signature.outputs)}
        self.inputs: list[Any] = [None] * len(self._names)
        self.outputs: list[Any] = [None] * len(self._out_names)
        self.ready: Ready | None = None
        self.results: list[Any] | None = None
        self.growths = 0
        self._kept: list[Any] = [None] * len(self._out_names)
        self._room: list[int] = [0] * len(self._out_names)
        self._framework: Any = None

    def bind(self, name: str, tensor: Any) -> None:
        """Take a tensor for an input or an output; InputError for a name that is neither."""
        held = tensor.detach() if hasattr(tensor, "detach") else tensor
        if isinstance(name, str) and name in self._names:
            self.inputs[self._names[name]] = held
        elif isinstance(name, str) and name in self._out_names:
            self.outputs[self._out_names[name]] = held
        else:
            known = [*self._names, *self._out_names]
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"bind: expected one of {', '.join(known)}, got {name!r}{hint}")
        self.ready = None

    def release(self) -> None:
        """Let go of every tensor."""
        self.inputs = [None] * len(self.inputs)
        self.outputs = [None] * len(self.outputs)
        self._kept = [None] * len(self._kept)
        self.ready = self.results = None

    def leaves(self) -> list[Any]:
        """Return the inputs; raises InputError where one is not bound."""
        missing = [name for name, i in self._names.items() if self.inputs[i] is None]
        if missing:
            raise InputError(
                f"run: nothing is bound to {', '.join(missing)}; bind(name, tensor) does it"
            )
        return self.inputs

    def targets(self, framework: Any, plan: Plan) -> list[Any]:
        """Return an output for each: the bound one, or memory kept here that every run reuses."""
        if framework is not self._framework:
            self._framework, self._room = framework, [0] * len(self._room)
        return [
            bound if bound is not None else self._keep(framework, plan, i)
            for i, bound in enumerate(self.outputs)
        ]

    def _keep(self, framework: Any, plan: Plan, position: int) -> Any:
        need = math.prod(plan.shapes[position])
        if need > self._room[position] or self._kept[position] is None:
            self.growths += self._room[position] > 0
            self._room[position] = max(need, _GROWTH * self._room[position])
            self._kept[position] = framework.flat(position, self._room[position])
        return framework.carve(self._kept[position], plan, position)
