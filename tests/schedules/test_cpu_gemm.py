"""The CPU GEMM computes what the PrimFunc it replaces does: layouts, dtypes, tails."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.schedules.gemm import TARGET, compiled, fused, gelu, lower, packed_block, random, run
from tvmcap.kernel.template import source_hash
from tvmcap.schedules import cpu_gemm
from tvmcap.schedules.cpu_target import pack_width
from tvmcap.schedules.gemm_match import pack, packed_matmul


@pytest.mark.parametrize("knobs", [{}, {"kc": 32, "mc": 12}, {"order": "m", "unroll": 1, "mc": 24}])
@pytest.mark.parametrize("n", [128, 100, 17, 7])
def test_packed_any_rows(n, knobs):
    """One kernel is right for every number of rows, with and without blocks of K."""
    k = 72
    kernel = compiled(lower(packed_block(n, k), **knobs))
    w, b = random(k, n), random(n)
    bp = pack(w, pack_width("float32", TARGET))
    for rows in (0, 1, 2, 5, 6, 7, 12, 13, 64, 129, 400):
        x = random(rows, k)
        np.testing.assert_allclose(
            run(kernel, [x, bp, b], (rows, n)), gelu(x @ w + b), atol=2e-5, rtol=1e-5
        )


def test_every_tile_of_the_space():
    """Each register tile, and a spread of the other knobs, gives the right result."""
    func = packed_block(96, 2048 + 16)
    problem = cpu_gemm.match(func, TARGET)
    points = cpu_gemm.space(problem, TARGET)
    assert 30 <= len(points) <= 300 and cpu_gemm.default(problem, TARGET) in points
    picks = {
        (c.mr, c.nv): c
        for c in np.random.default_rng(3).permutation(np.array(points, dtype=object))
    }
    w, b, x = random(2064, 96), random(96), random(31, 2064)
    for knobs in picks.values():
        kernel = compiled(lower(func, **dataclasses.asdict(knobs)))
        got = run(kernel, [x, pack(w, pack_width("float32", TARGET)), b], (31, 96))
        np.testing.assert_allclose(got, gelu(x @ w + b), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("mcpu", ["x86-64", "haswell", "skylake-avx512"])
def test_other_vector_widths(mcpu):
    """Plain x86-64, AVX2 and AVX-512 kernels compile; those that this machine can run are right."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2})
    width = pack_width("float32", target)
    assert width == {"x86-64": 8, "haswell": 16, "skylake-avx512": 64}[mcpu]

    def build(bb, x, w):
        return bb.emit(bb.call_te(packed_matmul, x, w, 40, primfunc_attrs={"op_pattern": 4}))

    func = fused([((9, 24), "float32"), ((-(-40 // width), 24, width), "float32")], build, target)
    exe = tvm.compile(
        tvm.IRModule({"main": lower(func, target).with_attr("global_symbol", "main")}), target
    )
    if all(
        tvm.get_global_func("target.llvm_cpu_has_feature")(f, TARGET) for f in ("avx2", "avx512f")
    ):
        x, w = random(9, 24), random(24, 40)
        np.testing.assert_allclose(
            run(exe["main"], [x, pack(w, width)], (9, 40)), x @ w, atol=1e-5, rtol=1e-5
        )


def test_aarch64_compiles():
    """A kernel for another architecture is made without running it."""
    target = tvm.target.Target(
        {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"], "num-cores": 4}
    )
    assert pack_width("float32", target) == 16
    func = fused(
        [((9, 24), "float32"), ((3, 24, 16), "float32")],
        lambda bb, x, w: bb.emit(
            bb.call_te(packed_matmul, x, w, 40, primfunc_attrs={"op_pattern": 4})
        ),
        target,
    )
    exe = tvm.compile(
        tvm.IRModule({"main": lower(func, target).with_attr("global_symbol", "main")}), target
    )
    assert "fmla" in exe.mod.inspect_source("asm")


def test_accumulators_stay_in_registers():
    """The innermost loop of a full tile has no access to the stack."""
    exe = tvm.compile(
        tvm.IRModule({"main": lower(packed_block(128, 64)).with_attr("global_symbol", "main")}),
        TARGET,
    )
    lines = exe.mod.inspect_source("asm").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(".LBB")]
    loops = [
        list(itertools.takewhile(lambda x: not x.lstrip().startswith("j"), lines[i:]))
        for i in starts
    ]
    tile = max(loops, key=lambda body: sum("vfmadd" in line for line in body))
    assert sum("vfmadd" in line for line in tile) >= 24
    assert not any("mm" in line and "%rsp" in line for line in tile)


def test_other_reductions_do_not_match():
    """A sum and a product with a producer of its own are left to other rules."""
    total = fused([((9, 24), "float32")], lambda bb, x: bb.emit(relax.op.sum(x, axis=1)))
    assert cpu_gemm.match(total, TARGET) is None
    assert cpu_gemm.match(packed_block(64, 16), tvm.target.Target("cuda")) is None


def test_key_features_and_hash():
    """JSON tells problems apart; one row of features a setting; a hash of the source."""
    problem, other = (cpu_gemm.match(packed_block(n, 64), TARGET) for n in (64, 128))
    assert problem.key() != other.key() and problem.key()["rows"] == "*"
    assert problem.flops({"B": 3}) == 2 * 3 * 64 * 64
    assert problem.bytes({"B": 3}) == 4 * (3 * 64 + 64 * 64 + 64 + 3 * 64)
    points = cpu_gemm.space(problem, TARGET)
    table = cpu_gemm.features(problem, points, TARGET)
    assert (
        table.shape == (len(points), len(cpu_gemm.TEMPLATE.feature_names))
        and np.isfinite(table).all()
    )
    template = cpu_gemm.TEMPLATE
    assert all(template.knobs_from_json(template.knobs_to_json(c)) == c for c in points)
    assert len(source_hash(template)) == 64
