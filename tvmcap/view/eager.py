"""What eager PyTorch launches for one call: its operators, with the bytes they read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tvmcap.base.score import KernelScore
from tvmcap.view.traffic import Moved

#: Operators that launch nothing though their schema shows no alias.
_FREE = ("_unsafe_view", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty")


class _Counter(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights, self.traffic = weights, Moved()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _FREE and not _is_view(func):
            self._record(name, _tensors((args, kwargs or {})), _tensors(result))
        return result

    def _record(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        for tensor in reads:
            if tensor.untyped_storage().data_ptr() in self.weights:
                self.traffic.weight_reads += _bytes(tensor)
            else:
                self.traffic.activations += _bytes(tensor)
        written = sum(map(_bytes, writes))
        self.traffic.activations += written
        self.traffic.kernels.append(KernelScore(name, sum(map(_bytes, reads)), written, "eager"))


def count_eager(call: Callable[[], Any], weights: Iterable[torch.Tensor] = ()) -> Moved:
    """Run ``call`` once and count; tensors that share storage with ``weights`` count as weights.

    An operator counts as one kernel, though some (a convolution, say) may launch more.
    """
    kept = {w.untyped_storage().data_ptr() for w in weights}
    mode = _Counter(kept)
    with torch.no_grad(), mode:
        result = call()
    mode.traffic.outputs = sum(map(_bytes, _tensors(result)))
    return mode.traffic


def parameters(fn: Callable[..., Any]) -> list[torch.Tensor]:
    """Parameters and buffers of a module; none for a function."""
    return [*fn.parameters(), *fn.buffers()] if isinstance(fn, torch.nn.Module) else []


def _is_view(func: Any) -> bool:
    """Whether every result only aliases an argument."""
    results = func._schema.returns
    return bool(results) and all(r.alias_info and not r.alias_info.is_write for r in results)


def _tensors(tree: Any) -> list[torch.Tensor]:
    found = {id(t): t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)}
    return list(found.values())


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())
