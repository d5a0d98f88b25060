"""Which operators of main can be quantized: products and convolutions with a constant weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax
from tvm.ir import GenericConst

from tvmcap.graph.convolution import Convolution
from tvmcap.graph.rewrite import is_op

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layer:
    """A product or a convolution with a constant weight.

    Attributes
    ----------
    name: of the weight where it is a frozen tensor of the model, else ``matmul_N`` or ``conv_N``.
    x, y: variables of main that hold the input and the result.
    weight: the constant, [K, N] of a product, [filters, channels, *kernel] of a convolution.
    conv: what convolution it is; None for a product.
    """

    name: str
    x: Any
    y: Any
    weight: Any
    conv: Convolution | None = None

    @property
    def k(self) -> int:
        """Length of its sums."""
        shape = [int(e) for e in self.weight.ty.shape.values]
        return shape[0] if self.conv is None else int(np.prod(shape[1:]))

    @property
    def bytes(self) -> int:
        """Bytes of the weight as it is."""
        return int(self.weight.value.numpy().nbytes)

    def values(self) -> Array:
        """Return the weight as a matrix [K, N] in float32, one column an output channel."""
        wide = np.asarray(self.weight.value.numpy(), dtype=np.float32)
        return wide if self.conv is None else self.conv.matrix(wide)


def layers(mod: tvm.IRModule, names_of: Callable[[Array], Sequence[str]]) -> list[Layer]:
    """List what can be quantized, in the order of main.

    ``names_of`` gives the names of the tensors that hold a weight as main has it: layers of equal
    weights take one each, and those of one weight are numbered.
    """
    found: list[Layer] = []
    taken: dict[str, int] = {}
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            conv = Convolution.of(value) if isinstance(value, relax.Call) else None
            if not (conv or is_op(value, "matmul")) or not _suits(conv, *value.args):
                continue
            kind = "conv" if conv else "matmul"
            names = names_of(value.args[1].value.numpy()) or [f"{kind}_{len(found)}"]
            name = next((n for n in names if n not in taken), names[0])
            taken[name] = taken.get(name, 0) + 1
            name = name if taken[name] == 1 else f"{name}#{taken[name]}"
            found.append(Layer(name, value.args[0], binding.var, value.args[1], conv))
    return found


def _suits(conv: Convolution | None, x: Any, weight: Any) -> bool:
    floats = isinstance(weight, GenericConst) and all(
        str(t.ty.dtype.dtype) in ("float32", "float16", "bfloat16") for t in (x, weight)
    )
    if not floats or not isinstance(x, relax.Var) or 0 in weight.value.shape:
        return False
    return conv is not None or (weight.ty.ndim == 2 and x.ty.ndim >= 2)
