"""The block in 8 bits as a library whose weights are arguments, and its product alone.

``tvmcap.build`` freezes the weights of quantized layers. A benchmark wants them as arguments, so
that calls can rotate through copies: else ours would find in the L2 cache what others read from
memory. The kernels are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gemm_common as gemm
import numpy as np

SHAPES = (
    gemm.Shape(2048, 1024, 4096),
    gemm.Shape(2048, 4096, 4096),
    gemm.Shape(8192, 8192, 8192),
    gemm.Shape(512, 3072, 12288),
)
SCHEMES = {"int8": "int8", "e4m3": "float8_e4m3fn"}
"""Name of a scheme to the dtype of its operands; activations have a scale a row."""
_BIAS = 2.0  # of all columns, where the scale of a column of ones is below 1


def fused(k: int, n: int, scheme: str) -> Any:
    """Return the fused module of the block as ``build`` and ``tune`` make it, weights frozen."""
    import torch
    from torch import nn

    from tvmcap.graph.layers import layers
    from tvmcap.graph.quantize import Plan, quantize

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(k, n)
            nn.init.constant_(self.up.weight, 1.0)
            nn.init.constant_(self.up.bias, _BIAS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.gelu(self.up(x), approximate="tanh")

    def in_8_bits(mod: Any) -> Any:
        found = layers(mod, lambda weight: None)
        return quantize(mod, {x.name: Plan(SCHEMES[scheme]) for x in found}, found)

    x = torch.zeros(128, k, dtype=torch.bfloat16)
    return gemm.fused(Block().bfloat16(), {"x": x}, in_8_bits)


def alone(mod: Any) -> Any:
    """Return a module of the product alone: what the other kernel made is an argument."""
    import tvm
    from tvm import relax

    from tvmcap.kernel import spaces
    from tvmcap.schedules.gemm_match import Gemm

    def is_product(call: Any) -> bool:
        pair = spaces.find(mod[call.args[0]], gemm.target())
        return pair is not None and isinstance(pair[1], Gemm)

    bindings = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    calls = [c for c in bindings if isinstance(c, relax.Call) and len(c.args) > 1]
    (call,) = (c for c in calls if is_product(c))
    inputs = {v: relax.Var(_name(v), v.ty) for v in call.args[1] if isinstance(v, relax.Var)}
    builder = relax.BlockBuilder(tvm.IRModule({call.args[0]: mod[call.args[0]]}))
    with builder.function("main", list(inputs.values()), attrs=dict(mod["main"].attrs)):
        with builder.dataflow():
            args = relax.Tuple([inputs.get(v, v) for v in call.args[1]])
            new = relax.Call(
                call.op, [call.args[0], args, *call.args[2:]], call.attrs, call.ty_args
            )
            out = builder.emit_output(new)
        builder.emit_func_output(out)
    return builder.get()


def _name(var: Any) -> str:
    return "top" if int(var.ty.shape.values[-1]) == 1 else "q"


def write(mod: Any, path: Path, logs: str | None) -> Any:
    """Compile a fused module into a library and return its manifest.

    What was constant is an argument after the others: ``w`` [N, K], ``scale`` [N], ``b`` [N].
    """
    from tvmcap import pipeline, versions
    from tvmcap.base import codegen
    from tvmcap.base.config import make_config
    from tvmcap.base.manifest import Manifest
    from tvmcap.kernel.choice import Chooser
    from tvmcap.kernel.stores import open_stores
    from tvmcap.library import arena, export, lower, weights

    target, trace = gemm.target(), pipeline.Trace()
    config = make_config(None, target="cuda:sm_90a", log_dir=logs)
    stores = open_stores(config, target)
    back = pipeline.back(
        target, lambda task: stores.timed(task.key, target), trace, Chooser(stores, target)
    )
    planned = pipeline.run(mod, back, target, config, trace)
    bare, frozen = weights.lift(planned, limit=0)
    params = list(bare["main"].params)
    given = len(params) - 1 - len(frozen or {})
    names = [p.name for p in params[:given]] + [_role(t) for t in (frozen or {}).values()]
    manifest = Manifest(
        versions=versions.versions(),
        target=codegen.describe(target),
        signature=_signature(names, params),
        coverage=tuple(s.to_json() for s in trace.coverage),
        kernels_per_call=pipeline.count_kernels(planned),
        arena=arena.sizes(planned),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return export.write(lower.lower(bare, target), path, manifest)


def _role(tensor: Any) -> str:
    if len(tensor.shape) == 2:
        return "w"
    return "b" if np.all(tensor.numpy() == _BIAS) else "scale"


def _signature(names: list[str], params: list[Any]) -> Any:
    from tvmcap.base.signature import DimSpec, Signature, TensorSpec

    def spec(name: str, param: Any) -> Any:
        shape = tuple(int(e) if hasattr(e, "value") else "B" for e in param.ty.shape.values)
        return TensorSpec(name, str(param.ty.dtype.dtype), shape)

    leaves: list[dict[str, Any]] = [{"kind": "leaf", "index": i} for i in range(len(names))]
    return Signature(
        inputs=tuple(map(spec, names, params)),
        outputs=(spec("out0", params[-1]),),
        dims=(DimSpec("B", 1, gemm.MAX_ROWS),),
        in_tree={"kind": "tuple", "items": leaves},
        out_tree=leaves[0],
        arg_names=tuple(names),
    )
