"""Random epilogues of a product: one kernel each, right on every target."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from tests.planned import calls
from tests.schedules.expressions import (
    COLUMNS,
    DEPTH,
    LEAVES,
    ROWS,
    Epilogue,
    build,
    check,
    generate,
    names,
)
from tests.schedules.operators import OPS
from tvmcap.base import codegen
from tvmcap.graph.fuse import fuse, legalize
from tvmcap.kernel import apply, spaces, tir_pipeline
from tvmcap.library import lower
from tvmcap.library.plan import plan

SEEDS = range(8)
CUDA = codegen.make_target({"kind": "cuda", "arch": "sm_90a"})


@pytest.fixture(scope="module")
def epilogues() -> list[Epilogue]:
    return [generate(seed) for seed in SEEDS]


def program(epilogues: list[Epilogue], dtype: str) -> Any:
    """Return main(x0, w0, leaves..., x1, ...) of all epilogues."""
    builder, params, all_values = relax.BlockBuilder(), [], []
    sizes = {"rows": ROWS, "columns": COLUMNS, 1: 1}
    for i, epilogue in enumerate(epilogues):
        shapes = {"x": (ROWS, DEPTH), "w": (DEPTH, COLUMNS)}
        types = {k: relax.TensorType(s, dtype) for k, s in shapes.items()}
        for leaf in epilogue.leaves:
            types[leaf] = relax.TensorType([sizes[e] for e in LEAVES[leaf]], "float32")
        all_values.append({k: relax.Var(f"{k}{i}", t) for k, t in types.items()})
        params += all_values[-1].values()
    with builder.function("main", params):
        with builder.dataflow():
            results = []
            for epilogue, values in zip(epilogues, all_values, strict=True):
                product = builder.emit(
                    relax.op.matmul(values["x"], values["w"], out_dtype="float32")
                )
                results += build(builder, epilogue, values | {"product": product})
            results = [builder.emit_output(r) for r in results]
        builder.emit_func_output(relax.Tuple(results))
    return builder.get()


def fused(epilogues: list[Epilogue], target: Any, dtype: str) -> Any:
    with target:
        mod = legalize(program(epilogues, dtype))
        return fuse(mod, lambda func: spaces.find(func, target) is not None)


def scheduled(epilogues: list[Epilogue], target: Any, dtype: str, template: str = "") -> Any:
    """Schedule all, which takes one kernel each, of a template."""
    coverage: list[apply.Served] = []
    mod = fused(epilogues, target, dtype)
    assert len(calls(mod)) == len(epilogues)
    with target:
        done = apply.schedule(mod, target, lambda task: [], coverage)
    assert all(s.served_by.startswith(f"template:{template}") for s in coverage)
    return done


def run(epilogues: list[Epilogue], target: Any, dtype: str) -> None:
    """Compile, run and compare with float64."""
    with target:
        planned = plan(scheduled(epilogues, target, dtype))
    device = tvm.cuda(0) if target.kind.name == "cuda" else tvm.cpu()
    main = relax.VirtualMachine(lower.lower(planned, target), device)["main"]
    arrays = []
    for epilogue in epilogues:
        arrays += [epilogue.values[k].astype(dtype) for k in ("x", "w")]
        arrays += [epilogue.values[k].astype("float32") for k in epilogue.leaves]
    outputs = [
        tvm.runtime.empty((ROWS, COLUMNS), d, device) for e in epilogues for _, d in e.outputs
    ]
    main(*(tvm.runtime.tensor(a, device) for a in arrays), *outputs)
    for i, epilogue in enumerate(epilogues):
        check(epilogue, [numbers(o) for o in outputs[2 * i : 2 * i + 2]])


def numbers(tensor: Any) -> Any:
    """Return a tensor's values in float64."""
    return tensor.numpy().astype(np.float64)


def test_the_seeds_use_every_operator_and_leaf(epilogues) -> None:
    used = set().union(*(names(node) for e in epilogues for node, _ in e.outputs))
    assert used == set(OPS) | set(LEAVES)
    assert {d for e in epilogues for _, d in e.outputs} == {"float32", "bfloat16", "float16"}
    assert all(max(node.depth for node, _ in e.outputs) == 8 for e in epilogues)


def test_llvm(epilogues) -> None:
    target = codegen.make_target("llvm")
    run(epilogues, target, "float32")


def test_cuda_source_holds_one_kernel_each(epilogues, tmp_path) -> None:
    """Tensor cores, and nvcc takes all of them at once."""
    mod = scheduled(epilogues[::3], CUDA, "bfloat16", "hopper_gemm")
    kernels = {
        g.name_hint: f.with_attr("global_symbol", g.name_hint)
        for g, f in mod.functions.items()
        if isinstance(f, tirx.PrimFunc)
    }
    with CUDA:
        done = tvm.compile(tvm.IRModule(kernels), target=CUDA, tir_pipeline=tir_pipeline.TIRX)
    source = str(done.mod.imports[0].inspect_source())
    parts = [p for p in source.split('extern "C" __global__')[1:] if "{" in p]  # no declarations
    assert len(parts) == len(kernels) and all("wgmma" in part for part in parts)
    nvcc = codegen.find_nvcc()
    if nvcc is None or shutil.which("g++") is None:
        pytest.skip("needs nvcc")
    (tmp_path / "kernels.cu").write_text(source)
    command = [nvcc, "-cubin", "-arch=sm_90a", "-std=c++17", "kernels.cu"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gpu(epilogues, dtype) -> None:
    run(epilogues, codegen.make_target("cuda"), dtype)
