"""The user's function on a flat list of tensors: parameters, buffers, then arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tvmcap.base.errors import CaptureError
from tvmcap.capture import arguments, memory, recurrent
from tvmcap.capture.structure import describe, replace_tensors


class Flat:
    """The user's function on a flat list of tensors: state first, then its arguments."""

    def __init__(self, call: arguments.BoundCall, state: Mapping[str, torch.Tensor]) -> None:
        self.call, self.state = call, list(state)
        self.module = _Holder(call) if state else None
        self.buffers = [n for n in state if self.module is not None and n in self.module.buffer_set]
        self.found = SimpleNamespace(out_tree=None, requires_grad=[], reads=[])

    def __call__(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the function's outputs, then what its buffers have become."""
        count = len(self.state)
        state = dict(zip(self.state, flat[:count], strict=True))
        rest = iter(flat[count:])
        values = [replace_tensors(value, lambda: next(rest)) for value in self.call.values]
        own = {f"fn.{n}": t.clone() if n in self.buffers else t for n, t in state.items()}
        with recurrent.Layers(), memory.Reads() as reads:
            if self.module is None:
                result, after = self.call.invoke(values), {}
            else:
                result, after = torch.func.functional_call(self.module, own, (values,))
        self.found.reads = reads.found
        outputs: list[tuple[str, torch.Tensor]] = []
        self.found.out_tree = describe(result, "output", outputs)
        if not outputs:
            raise CaptureError("the function returns no tensor; return what it computes")
        self.found.requires_grad = [tensor.requires_grad for _, tensor in outputs]
        ends = [after[name].detach() for name in self.buffers]
        # results that share memory with each other or with an input would be views in the graph
        return [*(tensor.clone() for _, tensor in outputs), *ends]


class _Holder(torch.nn.Module):  # type: ignore[misc]
    """Runs a module, and then says what its buffers have become."""

    def __init__(self, call: arguments.BoundCall) -> None:
        super().__init__()
        assert isinstance(call.fn, torch.nn.Module)
        self.fn, self.call_ = call.fn, call
        self.buffer_set = {name for name, _ in self.fn.named_buffers()}

    def forward(self, values: Sequence[Any]) -> tuple[Any, dict[str, torch.Tensor]]:
        result = self.call_.invoke(values)
        return result, {name: self.fn.get_buffer(name) for name in self.buffer_set}
