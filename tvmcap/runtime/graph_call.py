"""One entry of a library, called as the graph it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmcap.base.signature import TensorSpec, evaluate
from tvmcap.base.training import Entry
from tvmcap.runtime.executor import Executor


class GraphCall:
    """One entry of a library, called as the graph it was made of: tensors and sizes, in order."""

    def __init__(self, executor: Executor, entry: Entry, device: torch.device) -> None:
        self.executor, self.entry, self._device = executor, entry, device
        self._tensors = [i for i, port in enumerate(entry.inputs) if port.kind == "tensor"]
        self._sizes = {
            str(port.size): i for i, port in enumerate(entry.inputs) if port.kind == "size"
        }
        self._sized = [str(port.size) for port in entry.inputs if port.kind == "sized"]

    def __call__(self, *values: Any) -> list[Any]:
        """Run on the graph's inputs and return the graph's outputs."""
        results = self.executor(*self.tensors(values))
        dims: dict[str, int] | None = None
        out: list[Any] = []
        for port in self.entry.outputs:
            if port.kind == "tensor":
                out.append(results[port.index])
            elif port.kind == "input":
                out.append(values[port.index])
            elif port.kind == "size":
                dims = dims or self._dims(values)
                out.append(evaluate(port.size, dims))
            else:
                out.append(None)
        return out

    def tensors(self, values: Sequence[Any]) -> list[Any]:
        """Return the tensors that the entry takes for the graph's inputs."""
        found = [values[i] for i in self._tensors]
        for size in self._sized:
            number = int(values[self._sizes[size]])
            found.append(torch.empty((number,), dtype=torch.uint8, device=self._device))
        return found

    def _dims(self, values: Sequence[Any]) -> dict[str, int]:
        return dims_of(self.entry.signature.inputs, self.tensors(values))


def dims_of(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return the sizes of the symbolic dimensions that the shapes of inputs tell."""
    return {
        size: int(got)
        for spec, tensor in zip(specs, tensors, strict=True)
        for size, got in zip(spec.shape, tensor.shape, strict=True)
        if isinstance(size, str)
    }
