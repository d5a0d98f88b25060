"""Codegen: the planned module to a Relax VM executable, device code as a cubin, never source."""

from __future__ import annotations

import json
from typing import Any

import tvm
from tvm import relax

from tvmcap.base import codegen, ir_text
from tvmcap.base.errors import BuildError
from tvmcap.kernel import tir_pipeline
from tvmcap.library import cross

POINTER_ALIGN = 16
"""Bytes that the pointers of a library's arguments are aligned to; the runtime copies others."""


def lower(mod: tvm.IRModule, target: Any) -> Any:
    """Compile a planned module to TVM's VMExecutable.

    For cuda without a GPU it is what compiles in a process of its own when written.
    """
    if target.kind.name == "cuda" and codegen.gpu_architecture() is None:
        return cross.Apart(mod, codegen.export_target(target))
    return compile_module(mod, target)


def compile_module(mod: tvm.IRModule, target: Any) -> Any:
    """Compile in this process; raises BuildError with the compiler's own words chained."""
    kernels = {g: f for g, f in mod.functions.items() if isinstance(f, tvm.tirx.PrimFunc)}
    outside = {g: f for g, f in kernels.items() if tir_pipeline.name_for(f) == tir_pipeline.TIRX}
    inside = {g: promise_alignment(f) if g not in outside else f for g, f in kernels.items()}
    functions = {g: inside.get(g, f) for g, f in mod.functions.items() if g not in outside}
    mod = tvm.IRModule(functions, attrs={})
    if target.kind.name == "cuda":
        codegen.use_nvcc()
    try:
        with target, tvm.transform.PassContext(opt_level=3):
            if outside:
                named = {
                    g.name_hint: f.with_attr("global_symbol", g.name_hint)
                    for g, f in outside.items()
                }
                written = tvm.IRModule(named)
                apart = tvm.compile(written, target=target, tir_pipeline=tir_pipeline.TIRX)
            for step in (
                relax.transform.LowerRuntimeBuiltin(),
                relax.transform.ComputePrimValue(),
                relax.transform.VMShapeLower(),
                relax.transform.AttachGlobalSymbol(),
            ):
                mod = step(mod)
            if outside:  # last: the passes above drop the module's attributes
                mod = mod.with_attr("external_mods", [apart.mod])
            return relax.build(mod, target, relax_pipeline=None, tir_pipeline=tir_pipeline.LOOPS)
    except Exception as e:
        raise BuildError(f"code generation for {target.kind.name} failed: {_first_line(e)}") from e


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def promise_alignment(func: Any, align: int = POINTER_ALIGN) -> Any:
    """Lower the alignment a kernel assumes of its arguments from TVM's 64, which callers miss."""
    buffers = [param.ty for param in func.params if tvm.tirx.is_buffer_var(param)]
    if all(int(buffer.data_alignment) <= align for buffer in buffers):
        return func
    data = json.loads(tvm.ir.save_json(func))
    nodes = data["nodes"]
    root = nodes[data["root_index"]]["data"]
    for param in nodes[root["params"]]["data"]:
        fields = nodes[nodes[param]["data"]["ty"]]["data"]
        if "data_alignment" in fields:
            fields["data_alignment"] = min(fields["data_alignment"], align)
    return ir_text.parse(json.dumps(data))
