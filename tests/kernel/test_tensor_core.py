"""Tensor cores in the search over loop nests: wmma for bf16, the epilogue in the same kernel."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import tvm
from tvm import te

import tvmcap
from tests.schedules.products import product
from tvmcap.base import codegen
from tvmcap.base.config import Config
from tvmcap.kernel import features, loop_search, tasks, tensor_core, tir_pipeline
from tvmcap.kernel.stores import open_stores

GPU = {arch: codegen.make_target(f"cuda:{arch}") for arch in ("sm_75", "sm_80", "sm_90")}


def session(func, target, folder: Path) -> loop_search.LoopNestSession:
    stores = open_stores(Config(log_dir=str(folder)), target)
    task = tasks.make_task(func, target, lambda func, target: None)
    return loop_search.LoopNestSession(task, {}, target, stores, 0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make evolution quick: what is sampled is looked at and not timed."""
    for name, value in {"_WIDE": 8, "_NARROW": 8, "_FIRST": 1}.items():
        monkeypatch.setattr(loop_search, name, value)


def source(func, target) -> str:
    """Compile a scheduled PrimFunc to CUDA source, which needs no GPU."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with target:
        done = tvm.compile(mod, target, tir_pipeline=tir_pipeline.LOOPS)
    return str(done.mod.imports[0].inspect_source())


def cubin(code: str, arch: str, folder: Path) -> Path:
    """Compile CUDA source; raises where nvcc refuses it."""
    file, out = folder / "kernel.cu", folder / "kernel.cubin"
    file.write_text(code)
    command = [codegen.require_nvcc(), "-cubin", f"-arch={arch}", "-w", "-o", out, file]
    subprocess.run(command, check=True, capture_output=True, text=True)
    disassembler = shutil.which("cuobjdump")
    if disassembler is not None:
        sass = subprocess.run([disassembler, "-sass", out], capture_output=True, text=True)
        assert "HMMA" in sass.stdout
    return out


def kernels(code: str) -> int:
    return code.count("__global__ void __launch_bounds__") // 2


def two_outputs():
    """Return a product whose sum and its exponential are both results."""
    a, b = (te.placeholder((64, 64), "bfloat16", name=name) for name in "ab")
    k = te.reduce_axis((0, 64), name="k")

    def term(i, j):
        return a[i, k].astype("float32") * b[k, j].astype("float32")

    total = te.compute((64, 64), lambda i, j: te.sum(term(i, j), axis=k), name="total")
    first = te.compute((64, 64), lambda i, j: total[i, j].astype("bfloat16"), name="first")
    second = te.compute((64, 64), lambda i, j: te.exp(total[i, j]), name="second")
    return te.create_prim_func([a, b, first, second])


CASES = [
    ("sm_80", "bfloat16", "kn", (1024, 1024, 1024)),
    ("sm_90", "bfloat16", "nk", (1000, 1001, 333)),
    ("sm_80", "float16", "nk", (77, 130, 64)),
]


@pytest.mark.parametrize(("arch", "dtype", "layout", "sizes"), CASES)
def test_products_run_on_tensor_cores(small, tmp_path, arch, dtype, layout, sizes) -> None:
    rows, n, k = sizes
    func = product(rows, n, k, dtype, layout, target=GPU[arch])
    proposals = session(func, GPU[arch], tmp_path).propose(3)
    assert len(proposals) == 3
    for i, proposal in enumerate(proposals):
        code = source(proposal.candidate.func, GPU[arch])
        assert "wmma::mma_sync" in code and "wmma::load_matrix_sync" in code
        assert kernels(code) == 1, "the epilogue left the kernel"
        if i == 0:
            assert cubin(code, arch, tmp_path).stat().st_size


def test_a_recorded_trace_gives_the_candidate_again(small, tmp_path) -> None:
    func = product(96, 80, 64, target=GPU["sm_80"])
    search = session(func, GPU["sm_80"], tmp_path)
    (proposal,) = search.propose(1)
    again = features.replay(search.bound, proposal.trace)
    tvm.ir.assert_structural_equal(again.mod["main"].body, proposal.candidate.func.body)


def test_rows_of_bfloat16_are_padded_as_those_of_float16(small, tmp_path) -> None:
    for dtype in ("bfloat16", "float16"):
        func = product(128, 128, 128, dtype, target=GPU["sm_80"])
        (proposal,) = session(func, GPU["sm_80"], tmp_path / dtype).propose(1)
        aligned = [i for i in proposal.trace[0] if i[0] == "StorageAlign"]
        assert [i[2] for i in aligned] == [[0, -2, 32, 8]] * 2


def test_a_second_output_stays_a_kernel_of_its_own(small, tmp_path) -> None:
    func = two_outputs()
    (proposal,) = session(func, GPU["sm_80"], tmp_path).propose(1)
    code = source(proposal.candidate.func, GPU["sm_80"])
    assert "wmma::mma_sync" in code and kernels(code) > 1


def test_older_gpus_and_cpus_keep_tvms_own_space() -> None:
    func = product(64, 64, 64, target=GPU["sm_75"])
    for target in (GPU["sm_75"], codegen.make_target("llvm")):
        rules = [str(rule) for rule in tensor_core.space(func, target).sch_rules]
        assert any("MultiLevelTiling" in rule for rule in rules)
        assert not any("TensorCore" in rule or "WithIntrin" in rule for rule in rules)
    eight_bits = product(64, 64, 64, "int8", target=GPU["sm_75"])
    assert tensor_core.space(eight_bits, codegen.make_target("llvm")) == "post-order-apply"


def test_other_kernels_are_searched_as_before(small, tmp_path) -> None:
    from tests.kernel.test_fallback import CASES as OTHERS
    from tests.kernel.test_fallback import kernel

    op, _ = OTHERS["softmax"]
    func = kernel(op, (64, 512), target=GPU["sm_80"])
    proposals = session(func, GPU["sm_80"], tmp_path).propose(2)
    assert proposals and "mma" not in source(proposals[0].candidate.func, GPU["sm_80"])


def test_int8_products_keep_tensor_cores(small, tmp_path) -> None:
    a, b = (te.placeholder((64, 64), "int8", name=name) for name in "ab")
    k = te.reduce_axis((0, 64), name="k")

    def cell(i, j):
        return te.sum(a[i, k].astype("int32") * b[k, j].astype("int32"), axis=k)

    func = te.create_prim_func([a, b, te.compute((64, 64), cell)])
    (proposal,) = session(func, GPU["sm_80"], tmp_path).propose(1)
    code = source(proposal.candidate.func, GPU["sm_80"])
    assert "wmma::mma_sync" in code and "signed char" in code


@pytest.mark.gpu
def test_tuning_finds_tensor_core_kernels_where_no_template_serves(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    arch = str(codegen.gpu_architecture()).rstrip("a")
    x, w = (torch.randn(s, device="cuda").bfloat16() for s in ((500, 776), (1001, 776)))

    def block(x, w):
        return torch.nn.functional.silu(x @ w.T)

    options = {"target": {"kind": "cuda", "arch": arch}, "log_dir": str(tmp_path)}
    run = tvmcap.tune(block, (x, w), trials=10, **options)
    assert not run.failures.get("wrong result"), run.failures
    store = open_stores(Config(log_dir=str(tmp_path)), codegen.make_target(options["target"]))
    measured = [r for r in store.usable(codegen.make_target(options["target"])) if r.trace]
    cores = [r for r in measured if any(i[0] == "Tensorize" for i in r.trace[0])]
    assert any(r.median_us is not None for r in cores)
    lib = tvmcap.build(block, (x, w), **options)
    want = block(x.double(), w.double())
    torch.testing.assert_close(lib(x, w).double(), want, rtol=2e-2, atol=2e-1)
