"""The reference: the user's own PyTorch code with every operator run in higher precision.

Two modes widen every float that reaches a torch function or an operator, and every float dtype that
one is told to produce. So parameters, closures, exported graphs and hard-coded ``.float()`` casts
are all covered without touching the user's function.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tvmcap.base.errors import VerifyError
from tvmcap.base.numerics import compare, to_numpy
from tvmcap.base.signature import Signature, Tree, flatten

log = logging.getLogger("tvmcap")

#: Intermediates alive at once, over inputs and outputs: decides when to compute in parts.
_LIVE_FACTOR = 4
#: Eager in parts may differ from eager at once by this much of its largest value.
_PARTS_TOLERANCE = 1e-2


def reference_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return float32 where the widest float among ``tensors`` has 16 bits or less, else float64."""
    floats = [t.dtype.itemsize for t in tensors if t.is_floating_point()]
    return torch.float32 if floats and max(floats) <= 2 else torch.float64


class HighPrecision(TorchDispatchMode):  # type: ignore[misc]
    """Runs every operator in ``dtype``; operators that refuse it run as written, and are counted.

    Attributes
    ----------
    kept: operators that have no implementation in ``dtype``, by name, with their number of calls.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.kept: dict[str, int] = {}

    def widen(self, value: Any) -> Any:
        """Return ``value`` in ``dtype`` if it is a float tensor or a float dtype."""
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value if value.dtype == self.dtype else value.detach().to(self.dtype)
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return self.dtype
        return value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Widen the arguments, run, and widen what comes back."""
        wide_args, wide_kwargs = tree_map(self.widen, (args, kwargs or {}))
        try:
            return tree_map(self.widen, func(*wide_args, **wide_kwargs))
        except (RuntimeError, NotImplementedError) as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
            narrow_args, narrow_kwargs = tree_map(_narrow, (wide_args, wide_kwargs))
            try:
                result = func(*narrow_args, **narrow_kwargs)
            except Exception:
                raise e from None
            self.kept[str(func)] = self.kept.get(str(func), 0) + 1
            return tree_map(self.widen, result)


class _WideFunctions(TorchFunctionMode):  # type: ignore[misc]
    """Widens at the level of ``torch.nn.functional``, whose checks want equal dtypes."""

    def __init__(self, widen: Callable[[Any], Any]) -> None:
        super().__init__()
        self.widen = widen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        wide_args, wide_kwargs = tree_map(self.widen, (args, kwargs or {}))
        return func(*wide_args, **wide_kwargs)


def _narrow(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Choose kernels that exist in every precision: attention as written, no fused fast paths."""
    sdpa: Any = importlib.import_module("torch.nn.attention")
    mha: Any = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa.sdpa_kernel(sdpa.SDPBackend.MATH):
            yield
    finally:
        mha.set_fastpath_enabled(before)


class Tf32Products(TorchDispatchMode):  # type: ignore[misc]
    """Cuts the float32 operands of matrix products to tf32: the upper 10 bits of the mantissa.

    Products of such numbers are exact in float32, and are added in it, so that on any device the
    result has the error of tensor cores, which ignore the lower 13 bits (PTX ISA 9.0, "Matrix
    multiply-accumulate": tf32). It is at most 2^-9 of each product: 2^-10 an operand.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Cut the two factors where ``func`` is a product, then run it."""
        first = _FACTORS.get(str(func.overloadpacket))
        if first is not None:
            cut = [_to_tf32(a) for a in args[first : first + 2]]
            args = (*args[:first], *cut, *args[first + 2 :])
        return func(*args, **(kwargs or {}))


#: Operators that are products: where the first of their two factors stands.
_FACTORS = {
    **{f"aten.{name}": 0 for name in ("mm", "bmm", "mv", "dot", "vdot")},
    **{f"aten.{name}": 1 for name in ("addmm", "baddbmm", "addbmm", "addmv")},
}
_TF32_MASK = -(1 << 13)


def _to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype != torch.float32:
        return tensor
    cut = (tensor.view(torch.int32) & _TF32_MASK).view(torch.float32)
    return torch.where(torch.isfinite(tensor), cut, tensor)


def run_eager(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tf32: bool = False,
) -> Any:
    """Run ``fn`` as PyTorch does, without gradients; with ``tf32`` its products are in tf32."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if tf32:
            stack.enter_context(_plain_kernels())
            stack.enter_context(Tf32Products())
        return fn(*args, **kwargs)


def run_reference(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> Any:
    """Run ``fn`` with every operator in ``dtype`` (default: ``reference_dtype`` of the inputs).

    Returns the structure that ``fn`` returns, its float tensors in ``dtype``.
    """
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    mode = HighPrecision(dtype or reference_dtype(tensors))
    wide_args, wide_kwargs = tree_map(mode.widen, (tuple(args), dict(kwargs)))
    with _plain_kernels(), mode, _WideFunctions(mode.widen):
        result = fn(*wide_args, **wide_kwargs)
    if mode.kept:
        log.info("reference: no %s for %s; run in float32", mode.dtype, ", ".join(mode.kept))
    return result


def split_axes(specs: Sequence[Any], dim: str) -> list[int | None] | None:
    """Axis of each tensor that the symbolic ``dim`` alone spans; None where a tensor mixes it."""
    axes: list[int | None] = []
    for spec in specs:
        using = [
            i
            for i, s in enumerate(spec.shape)
            if isinstance(s, str) and re.search(rf"\b{dim}\b", s)
        ]
        if len(using) > 1 or any(spec.shape[i] != dim for i in using):
            return None
        axes.append(using[0] if using else None)
    return axes


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on ``device`` now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(importlib.import_module("psutil").virtual_memory().available)


def parts_needed(leaves: Sequence[torch.Tensor], outputs: Sequence[Any]) -> int:
    """Parts to compute in, so that an estimate of the reference's memory stays within half."""
    count = sum(t.numel() for t in leaves) + sum(int(np.prod(o.shape)) for o in outputs)
    device = leaves[0].device if leaves else torch.device("cpu")
    return max(1, -(-_LIVE_FACTOR * 8 * int(count) // max(1, free_bytes(device) // 2)))


def in_parts(
    call: Callable[[list[torch.Tensor]], Any],
    leaves: list[torch.Tensor],
    signature: Signature,
    parts: int,
    eager: Sequence[np.ndarray[Any, Any]],
    run: Callable[[Callable[[], Any]], Any],
) -> list[np.ndarray[Any, Any]]:
    """Compute the reference in ``parts`` along a symbolic dimension, as host arrays.

    ``call(leaves)`` runs the user's code; ``run(thunk)`` runs a thunk in higher precision. Eager
    computed in the same parts must agree with ``eager``, else the parts depend on each other.
    Raises VerifyError where no dimension can be split.
    """
    for dim in signature.dims:
        inputs = split_axes(signature.inputs, dim.name)
        outputs = split_axes(signature.outputs, dim.name)
        if inputs is None or outputs is None or None in outputs or not any_axis(inputs):
            continue
        pieces = list(_pieces(leaves, inputs, parts))
        native = _join([_host(signature.out_tree, call(p)) for p in pieces], outputs)
        if not all(_close(a, b) for a, b in zip(native, eager, strict=True)):
            continue
        wide = [_host(signature.out_tree, run(lambda p=p: call(p))) for p in pieces]  # type: ignore[misc]
        return _join(wide, outputs)
    raise VerifyError(
        f"the reference needs {parts} parts to fit in memory, and no symbolic dimension splits the "
        "computation into independent parts; verify at smaller sizes, with verify(lib, sizes=...)"
    )


def any_axis(axes: Sequence[int | None]) -> bool:
    """Whether any tensor has the dimension."""
    return any(a is not None for a in axes)


def _pieces(
    leaves: list[torch.Tensor], axes: Sequence[int | None], parts: int
) -> Iterator[list[torch.Tensor]]:
    size = next(t.shape[a] for t, a in zip(leaves, axes, strict=True) if a is not None)
    step = max(1, -(-size // parts))
    for start in range(0, size, step):
        count = min(step, size - start)
        yield [
            t if a is None else t.narrow(a, start, count).contiguous()
            for t, a in zip(leaves, axes, strict=True)
        ]


def _host(tree: Tree, value: Any) -> list[np.ndarray[Any, Any]]:
    return [to_numpy(t) for t in flatten(tree, value)]


def _join(parts: list[list[Any]], axes: Sequence[int | None]) -> list[np.ndarray[Any, Any]]:
    columns = zip(*parts, strict=True)
    return [np.concatenate(c, axis=a or 0) for c, a in zip(columns, axes, strict=True)]


def _close(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.shape != b.shape:
        return False
    finite = b[np.isfinite(b)]
    scale = float(np.abs(finite.astype(np.float64)).max()) if finite.size else 1.0
    return compare(a, b, dtype="float64").max_abs <= _PARTS_TOLERANCE * scale
