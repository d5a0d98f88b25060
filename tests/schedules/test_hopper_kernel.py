"""The CUDA source of Hopper kernels: the instructions that a setting asks for, and no spills."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.schedules.hopper import Case, bodies, compiled, resources
from tests.schedules.hopper_cases import SWAPPED
from tests.schedules.products import TARGET
from tvmcap.base import codegen
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules.hopper_gemm import Knobs
from tvmcap.schedules.hopper_plan import OPERANDS, plan

ROWS = {"bm": 128, "groups": "rows"}
DIRECT = {"tma_store": False}
WIDE = {"n": 4096, "k": 512}


def case(name: str, shape: dict[str, Any], *outs: str, **knobs: Any) -> Case:
    return Case(name, Knobs(**{"stages": 3, **knobs}), {**WIDE, **shape}, outs)


CASES = [
    case("rows", {}, **ROWS, bn=192, late=False),
    case("narrow", {"layout": "nk"}, **ROWS, bn=112, cluster_m=2),
    case("tall", {"layout": "nk"}, bm=256, bn=96, groups="rows", cluster_n=2),
    case("columns", {"layout": "nk"}, bm=64, bn=224, groups="columns", dependent=False),
    case("three", {"layout": "nk", "dtype": "float16"}, bm=192, bn=160, groups="columns"),
    case("turns", {}, bm=128, bn=128, groups="tiles", warm=True),
    case("low", {"layout": "nk"}, bm=64, bn=256, groups="tiles", bk=64, **DIRECT),
    case("deep", {}, **ROWS, bn=64, bk=128, persistent=False),
    case("split", {"layout": "nk", "out": "float32"}, **ROWS, bn=64, split=4, **DIRECT),
    case("both", {"a_layout": "km", "rows": "8*T"}, bn=64, split=2, cluster_m=2, **DIRECT),
    case("batch", {"a_layout": "km", "batch": ("H",), "shared": ("b",), "rows": 64}, **ROWS),
    case(
        "tf32",
        {"dtype": "float32", "out": "float32", "layout": "nk", "tf32": True},
        **{**ROWS, **DIRECT, "stages": 2},
    ),
    case("outputs", {"dtype": "float16"}, "float16", "bfloat16", **ROWS),
    case("mixed", {}, "float32", "bfloat16", **ROWS, **DIRECT),
    case("residual", {"lead": ("T",), "residual": True, "layout": "nk"}, **ROWS, **DIRECT),
    case("symbols", {"n": "8*T", "k": "8*T", "layout": "nk"}, **ROWS, bn=160),
    case("odd", {"n": 257, "layout": "nk"}, **ROWS, **DIRECT),
    case("swapped", {"layout": "nk"}, bm=64, bn=16, bk=128, split=2, **SWAPPED),
]
NAMES = pytest.mark.parametrize("name", [c.name for c in CASES])
BY_NAME = {c.name: c for c in CASES}


@pytest.fixture(scope="module")
def source() -> str:
    """All kernels, compiled at once."""
    return str(compiled(CASES).mod.imports[0].inspect_source())


@pytest.fixture(scope="module")
def counted(source, tmp_path_factory) -> Any:
    """What ptxas gives each, and what it says of wgmma."""
    if codegen.find_nvcc() is None:
        pytest.skip("needs nvcc")
    return resources(source, tmp_path_factory.mktemp("kernels"))


@NAMES
def test_the_source_does_what_the_setting_says(source, name) -> None:
    knobs, body = BY_NAME[name].knobs, bodies(source)[name]

    def calls(pattern: str) -> int:
        return len(re.findall(rf"{pattern}\w*\(", body))

    early = 1 if knobs.dependent else 0
    assert calls("griddepcontrol_launch_dependents") == early
    assert calls("griddepcontrol_wait") == 2 * early  # of the producer and of the consumers
    warms = knobs.warm or (knobs.swapped and knobs.dependent)
    assert (calls("cp_async_bulk_tensor_prefetch") > 0) == warms
    if knobs.swapped:
        return
    assert "__launch_bounds__(384, 1)" in body
    assert calls("setmaxnreg_dec") == calls("setmaxnreg_inc") == 1
    loads = r"cp_async_bulk_tensor_g2s\w*"
    assert (calls(rf"{loads}multicast__cluster") > 0) == (knobs.cluster_m * knobs.cluster_n > 1)
    assert (calls("cp_async_bulk_tensor_s2g") > 0) == knobs.tma_store
    assert (calls("tvmcap_send") > 0) == (knobs.split > 1)
    assert (calls("tvmcap_arrive") > 0) == (knobs.cluster_m * knobs.cluster_n > 1)
    assert (calls("bar_arrive") > 0) == (knobs.groups == "tiles")
    assert calls("wgmma_wait_group_wait_group_sync_aligned_1") == int(knobs.late)


@NAMES
def test_instructions_cover_the_tile(source, name) -> None:
    one, body = BY_NAME[name], bodies(source)[name]
    knobs = one.knobs
    if knobs.swapped:
        pytest.skip("another kernel")
    gemm = hopper.match(one.func, TARGET)
    p = plan(gemm, knobs)
    kind, item = OPERANDS[str(gemm.a.dtype)]
    flags = "" if item == 4 else f"_{int(gemm.a_layout == 'km')}_{int(gemm.layout == 'kn')}"
    mma = f"m64n{p.group_columns}k{32 // item}_f32_{kind}_{kind}_1_1{flags}("
    assert body.count(mma) == knobs.bk * item // 32 * p.tall
    assert len(re.findall(r"wgmma\w*_mma_async\w*\(", body)) == body.count(mma)
    dimensions = set(re.findall(r"async_bulk_tensor_(\d)d_shared", body))
    assert dimensions == ({"2", "3"} if name == "batch" else {"2"})  # B is one matrix


@pytest.mark.parametrize("columns", [384, 512])
def test_the_epilogue_reads_nothing_past_the_edge(columns) -> None:
    """Two CTAs side by side have 256 columns: of 384, the last has none."""
    one = case("edge", {"n": columns, "layout": "nk"}, **ROWS, bn=128, cluster_n=2)
    body = bodies(str(compiled([one]).mod.imports[0].inspect_source()))["edge"]
    assert (f", {columns - 2})" in body) == (columns == 384)


def test_messages_of_a_cluster_count_their_bytes(source) -> None:
    assert "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32" in source
    assert "mapa.shared::cluster.u32" in source


@NAMES
def test_parameters_and_launch(name) -> None:
    one = BY_NAME[name]
    knobs, kernel = one.knobs, one.lowered
    assert kernel.attrs["tirx.is_scheduled"] and list(kernel.params) == list(one.func.params)
    launch = [str(tag) for tag in kernel.attrs["tirx.kernel_launch_params"]]
    assert ("tirx.use_programtic_dependent_launch" in launch) == knobs.dependent
    clustered = knobs.cluster_m * knobs.cluster_n * knobs.split > 1
    assert ("clusterCtaIdx.x" in launch) == clustered
    assert {"blockIdx.x", "threadIdx.x", "tirx.use_dyn_shared_memory"} <= set(launch)


@NAMES
def test_nothing_spills(counted, name) -> None:
    found, _ = counted
    assert set(found) == set(BY_NAME)
    assert found[name].stack == found[name].spilled == 0
    threads = 160 if BY_NAME[name].knobs.swapped else 384
    assert found[name].registers * threads <= 65536


def test_wgmma_is_not_serialized(counted) -> None:
    assert counted[1] == ""
