"""The fixed tensor-core schedule: products of any sizes, and symbolic ones by a trace's tile."""

from __future__ import annotations

import pytest
import tvm

import tvmcap
from tests.kernel.test_tensor_core import (
    GPU,
    cubin,
    kernels,
    session,
    small,  # noqa: F401  (a fixture)
    source,
    two_outputs,
)
from tests.schedules.products import product
from tvmcap import pipeline
from tvmcap.base import codegen
from tvmcap.base.config import Config
from tvmcap.capture.export import capture
from tvmcap.kernel import apply, fallback, prim_func, spaces, tasks, traces
from tvmcap.kernel import tensor_core_rule as rule
from tvmcap.kernel.loop_search import LoopNestSession
from tvmcap.kernel.measure import Measurement
from tvmcap.kernel.stores import open_stores

TARGET = GPU["sm_80"]

CASES = {
    "static": {"rows": 256, "n": 256, "k": 128},
    "symbolic rows": {"rows": "B", "n": 256, "k": 128, "layout": "nk"},
    "odd sizes": {"rows": "B", "n": 1001, "k": 333},
    "few rows": {"rows": 17, "n": 100, "k": 61, "layout": "nk"},
    "batch": {"rows": "T", "n": 128, "k": 64, "batch": ("H",)},
    "residual": {"rows": "B", "n": 128, "k": 64, "lead": ("T",), "residual": True},
    "float16": {"rows": "B", "n": 64, "k": 64, "dtype": "float16"},
    "float32 result": {"rows": "B", "n": 64, "k": 64, "out": "float32"},
}


@pytest.mark.parametrize("case", CASES)
def test_untuned_products_run_on_tensor_cores(case, tmp_path) -> None:
    func = product(**CASES[case], target=TARGET)
    assert spaces.find(func, TARGET) is None
    done, name = fallback.schedule(func, TARGET)
    assert name == "tensor-core" and done.attrs["tirx.is_scheduled"]
    code = source(done, TARGET)
    assert "wmma::mma_sync" in code and kernels(code) == 1
    if case in ("static", "odd sizes"):
        assert cubin(code, "sm_80", tmp_path).stat().st_size


OTHERS = {
    "float32": {"dtype": "float32"},
    "one row": {"rows": 1},
    "few columns": {"rows": 64, "n": 8},
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_products_keep_their_template(case) -> None:
    func = product(**OTHERS[case], target=TARGET)
    assert spaces.find(func, TARGET)[0].name == "simt_gemm"
    assert spaces.find(product(target=GPU["sm_75"]), GPU["sm_75"])[0].name == "simt_gemm"


def test_what_the_schedule_does_not_fit() -> None:
    assert rule.schedule(two_outputs(), TARGET) is None
    assert rule.schedule(product(dtype="float32", target=TARGET), TARGET) is None
    assert rule.schedule(product(target=GPU["sm_75"]), GPU["sm_75"]) is None
    huge = rule.Tile((4, 4), (4, 4), 8)
    assert huge.shared_bytes(False) > int(TARGET.attrs["max_shared_memory_per_block"])
    assert rule.schedule(product(target=TARGET), TARGET, huge) is None


@pytest.mark.parametrize("tile", [rule.LARGE, rule.NARROW, rule.Tile((2, 2), (4, 2), 2)])
@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_shared_memory_is_what_the_tile_says(tile, layout) -> None:
    done = rule.schedule(product(1024, 1024, 1024, layout=layout, target=TARGET), TARGET, tile)
    seen: list[str] = []

    @tvm.instrument.pass_instrument
    class Look:
        def run_after_pass(self, mod, info) -> None:
            if "MergeSharedMemoryAllocations" in info.name:
                seen.append(mod.script())

    mod = tvm.IRModule({"main": done.with_attr("global_symbol", "main")})
    config = {"tirx.merge_static_smem": True}
    with TARGET, tvm.transform.PassContext(config=config, instruments=[Look()]):
        tvm.compile(mod, TARGET)
    size = tile.shared_bytes(layout == "nk")
    assert f'T.alloc_buffer(({size},), "uint8", scope="shared.dyn")' in seen[0]


@pytest.mark.parametrize("sizes", [(512, 256, 128), (500, 201, 100)])
def test_a_symbolic_product_takes_the_tile_of_a_trace(small, tmp_path, sizes) -> None:  # noqa: F811
    rows, n, k = sizes
    (proposal,) = session(product(rows, n, k, target=TARGET), TARGET, tmp_path).propose(1)
    tile = rule.tile_of(proposal.trace)
    threads = 32 * tile.warps[0] * tile.warps[1]
    assert f"__launch_bounds__({threads})" in source(proposal.candidate.func, TARGET)
    func = product("B", n, k, target=TARGET)
    done = traces.apply_trace(func, proposal.trace, TARGET)
    code = source(done, TARGET)
    assert "wmma::mma_sync" in code and f"__launch_bounds__({threads})" in code
    assert prim_func.size_vars(done)


def test_a_record_at_one_size_serves_symbolic_rows(small, tmp_path) -> None:  # noqa: F811
    torch = pytest.importorskip("torch")
    config = Config(dynamic={"x": {0: "B"}}, log_dir=str(tmp_path))
    args = torch.randn(40, 72).bfloat16(), torch.randn(72, 101).bfloat16()
    captured = capture(lambda x, w: torch.relu(x @ w), args, None, config)
    mod = pipeline.run(captured.mod, pipeline.front(TARGET), TARGET, config, pipeline.Trace())
    (task,) = tasks.extract(mod, TARGET, spaces.find)
    search = LoopNestSession(task, {"B": 512}, TARGET, open_stores(config, TARGET), 0)
    (proposal,) = search.propose(1)
    made = search.record(proposal, Measurement(3.0, 3.0, 3.0, 9))
    coverage: list[apply.Served] = []
    apply.schedule(mod, TARGET, lambda task: [made], coverage)
    (served,) = coverage
    assert served.served_by == "trace" and served.tuned and list(served.records) == ["s0=512"]
    assert "no hopper_gemm: sm_80 has no wgmma; the trace's tile" in served.reason
    assert list(served.ranges) == ["<=16", "any"]


def test_few_rows_have_a_kernel_on_cuda_cores() -> None:
    bound, kernel, name = spaces.few_rows(product(n=1001, target=TARGET), TARGET)
    assert bound == 16 and name.startswith("template:simt_gemm")
    assert "s_tir" not in kernel.attrs
    for other in ({"rows": 64}, {"dtype": "float32"}, {"batch": (3,)}):
        assert spaces.few_rows(product(**other, target=TARGET), TARGET) is None
    assert spaces.few_rows(product(target=GPU["sm_75"]), GPU["sm_75"]) is None


def test_a_trace_of_a_loop_nest_has_no_tile() -> None:
    assert rule.tile_of([[["GetSBlock", [], ["x"], ["b0"]]], []]) is None


def test_a_library_with_other_kernels_beside(without_gpu: None) -> None:
    torch = pytest.importorskip("torch")
    x, w = torch.randn(40, 72).bfloat16(), torch.randn(72, 101).bfloat16()

    def block(x, w):
        return torch.nn.functional.gelu(x @ w).sum(0)

    lib = tvmcap.build(
        block, (x, w), target="cuda:sm_80", dynamic={"x": {0: "B"}}, tune="none", verify=False
    )
    text = lib.explain()
    assert "rule:tensor-core" in text and "dlight-" in text
    assert "no hopper_gemm: sm_80 has no wgmma; no record" in text
    assert "up to 16 rows: template:simt_gemm" in text and "above: tensor cores" in text
    assert b"sm_80" in lib.path.read_bytes()


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["odd", "batch", "static"])
def test_results_are_right_at_any_rows(case) -> None:
    torch = pytest.importorskip("torch")
    arch = str(codegen.gpu_architecture()).rstrip("a")
    batch, n, k = {"odd": ((), 1001, 333), "batch": ((3,), 128, 64), "static": ((), 256, 128)}[case]
    dynamic = None if case == "static" else {"x": {len(batch): "B"}}

    def block(x, w, b):
        return torch.nn.functional.gelu(x @ w + b, approximate="tanh")

    def make(rows):
        shapes = ((*batch, rows, k), (*batch, k, n), (n,))
        return [torch.randn(s, device="cuda").bfloat16() for s in shapes]

    target = {"kind": "cuda", "arch": arch}
    lib = tvmcap.build(block, make(130), target=target, dynamic=dynamic, tune="none", verify=False)
    assert "rule:tensor-core" in lib.explain()
    for rows in (130,) if dynamic is None else (1, 16, 127, 129, 700):
        args = make(rows)
        want = block(*(a.double() for a in args))
        torch.testing.assert_close(lib(*args).double(), want, rtol=2e-2, atol=2e-1)
