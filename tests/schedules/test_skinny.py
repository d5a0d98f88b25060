"""The skinny GEMM: what its kernels are made of, and their numerics on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import subprocess

import pytest
import torch
import torch.nn.functional as F
import tvm
from tvm import te, tirx

from tests.schedules.products import TARGET, product, source_of
from tvmcap.base import codegen
from tvmcap.kernel import tir_pipeline
from tvmcap.schedules import gemm_match
from tvmcap.schedules.hopper_ops import launch_params
from tvmcap.schedules.skinny_kernel import skinny_bytes, skinny_kernel


@dataclasses.dataclass(frozen=True)
class Knobs:
    """The fields that the kernel reads."""

    bm: int = 64
    bn: int = 16
    bk: int = 128
    stages: int = 3
    split: int = 1
    dependent: bool = False


def lowered(func, knobs, dependent=False):
    gemm = gemm_match.read(func)
    assert gemm is not None
    attrs = {"tirx.is_scheduled": True, "global_symbol": "gemm"}
    knobs = dataclasses.replace(knobs, dependent=dependent)
    attrs["tirx.kernel_launch_params"] = launch_params(knobs.split, dependent)
    body = skinny_kernel(gemm, knobs).body
    return tirx.PrimFunc(func.params, body).with_attr(attrs)


def two_outputs(n, k, dtype="bfloat16"):
    """Return the PrimFunc of ``u = x @ w + b`` in float32 and ``gelu(u)``."""
    rows, axis = tirx.Var("B", "int64"), te.reduce_axis((0, k), name="k")
    x, w, b = (te.placeholder(shape, dtype) for shape in ((rows, k), (k, n), (n,)))

    def term(i, j):
        return x[i, axis].astype("float32") * w[axis, j].astype("float32")

    def gelu(v):
        inner = 0.7978845608 * (v + 0.044715 * v * v * v)
        return (0.5 * v * (1.0 + te.tanh(inner))).astype(dtype)

    total = te.compute((rows, n), lambda i, j: te.sum(term(i, j), axis=axis))
    plain = te.compute((rows, n), lambda i, j: total[i, j] + b[j].astype("float32"))
    active = te.compute((rows, n), lambda i, j: gelu(plain[i, j]))
    return te.create_prim_func([x, w, b, plain, active])


def resources(source, folder):
    """Return (stack bytes, spilled bytes, registers) of a kernel, as ptxas counts them."""
    (folder / "kernel.cu").write_text(source)
    command = [str(codegen.find_nvcc()), "-cubin", "-arch=sm_90a", "-Xptxas", "-v"]
    done = subprocess.run(
        [*command, "-o", str(folder / "kernel.cubin"), str(folder / "kernel.cu")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "wgmma" not in done.stderr  # ptxas says where it serializes them
    stack, *spilled = re.findall(r"(\d+) bytes (?:stack frame|spill)", done.stderr)
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    return int(stack), sum(map(int, spilled)), int(registers)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(bn=8),
        Knobs(bn=16, split=4),
        Knobs(bm=128, bn=32, bk=64, split=2),
        Knobs(bm=128, bn=64, bk=256, stages=2, split=8),
    ],
    ids=str,
)
def test_source_of_a_setting(knobs, layout) -> None:
    func = product(n=4096, k=4096, layout=layout)
    kernel = lowered(func, knobs)
    assert list(kernel.params) == list(func.params)
    source = source_of(kernel)
    body = source[source.rindex("gemm_kernel(") :]
    flags = int(layout == "kn"), 0  # w is transposed where its columns are contiguous
    mma = f"m64n{knobs.bn}k16_f32_bf16_bf16_1_1_{flags[0]}_{flags[1]}("
    assert body.count(mma) == knobs.bk // 16 and "L2::cache_hint" in source
    threads = 128 * knobs.bm // 64 + 32
    assert f"__launch_bounds__({threads})" in source
    assert ("st.async.shared::cluster" in source) == (knobs.split > 1)
    assert "barrier.cluster.arrive.release" not in source  # which waits for all of memory
    script = tvm.IRModule({"gemm": kernel}).script()
    assert ("cta_id_in_cluster" in script) == (knobs.split > 1)
    barriers = [int(i) for i in re.findall(r"\(uint64_t\*\)\w+\)\[(\d+)\]", body)]
    used = 8 * (max(barriers) + 1)  # they come last
    assert used <= skinny_bytes(gemm_match.read(func), knobs) <= used + 16


def test_bytes_grow_with_every_dimension() -> None:
    base = skinny_bytes(None, Knobs())
    for change in ({"bm": 128}, {"bn": 32}, {"bk": 256}, {"stages": 4}):
        assert skinny_bytes(None, dataclasses.replace(Knobs(), **change)) > base
    assert 2 * (skinny_bytes(None, Knobs(stages=4)) + 1024) <= 228 * 1024  # two blocks fit


def test_a_dependent_kernel_waits_for_the_one_before() -> None:
    source = source_of(lowered(product(n=256, k=512), Knobs(split=2), dependent=True))
    body = source[source.rindex("gemm_kernel(") :]
    waits = [m.start() for m in re.finditer(r"griddepcontrol_wait", body)]
    assert len(waits) == 2 and "cp.async.bulk.prefetch.tensor" in source
    assert waits[0] < body.index("complete_tx__bytes") and "launch_dependents" in body
    assert "griddepcontrol" not in source_of(lowered(product(n=256, k=512), Knobs(split=2)))


@pytest.mark.skipif(codegen.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("knobs", "layout"),
    [(Knobs(bn=8, split=8), "nk"), (Knobs(bm=128, bn=64, bk=64), "kn")],
    ids=str,
)
def test_nothing_spills(knobs, layout, tmp_path) -> None:
    func = product(n=4104, k=1032, layout=layout, residual=True, dtype="float16")
    stack, spilled, registers = resources(source_of(lowered(func, knobs)), tmp_path)
    assert stack == spilled == 0
    assert registers * (128 * knobs.bm // 64 + 32) <= 65536 // 2


def test_two_outputs_of_which_one_is_float32() -> None:
    source = source_of(lowered(two_outputs(136, 520), Knobs(split=2)))
    assert "float* __restrict__" in source and "m64n16k16" in source


# On a GPU. Every operand lies inside a larger one that holds NaN.


@functools.cache
def built(knobs, dependent=False, maker=product, **kwargs):
    """Compile and load a kernel with symbolic rows."""
    import tempfile

    from tvmcap.runtime.loader import ffi, load_cuda_runtime

    codegen.use_nvcc()
    load_cuda_runtime()
    kernel = lowered(maker(**kwargs), knobs, dependent)
    with TARGET:
        mod = tvm.IRModule({"gemm": kernel})
        done = tvm.compile(mod, target=TARGET, tir_pipeline=tir_pipeline.TIRX)
    with tempfile.TemporaryDirectory() as folder:
        done.export_library(f"{folder}/gemm.so")
        return ffi().load_module(f"{folder}/gemm.so")["gemm"]


def inside(values, dtype):
    """Return a contiguous view of the values on the GPU, with NaN before and after it."""
    room = torch.full((values.numel() + 2048,), float("nan"), dtype=dtype, device="cuda")
    view = room[1024 : 1024 + values.numel()].view(values.shape)
    return view.copy_(values), room


def check(kernel, rows, n, k, dtype, layout="nk", residual=False, outs=None, lead=()):
    """Compare a kernel with float64; nothing but the outputs may be written."""
    make = torch.Generator().manual_seed(rows * 7 + n)
    outs = outs or [dtype]
    shapes = {"x": (*lead, rows, k), "w": (n, k) if layout == "nk" else (k, n), "b": (n,)}
    shapes |= {"r": (*lead, rows, n)} if residual else {}
    tensors = {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
    tensors["w"] /= k**0.5
    given = {name: inside(t, dtype)[0] for name, t in tensors.items()}
    results = [inside(torch.full((*lead, rows, n), float("nan")), out) for out in outs]
    kernel(*given.values(), *(view for view, _ in results))
    torch.cuda.synchronize()
    wide = {name: t.double() for name, t in given.items()}
    w = wide["w"].T if layout == "nk" else wide["w"]
    plain = wide["x"] @ w + wide["b"]
    wanted = F.gelu(plain, approximate="tanh") + wide.get("r", 0)
    for (got, room), want in zip(results, [plain, wanted][-len(outs) :], strict=True):
        allowed = 0.51 * torch.finfo(got.dtype).eps * want.abs() + 2e-5
        wrong = ~((got.double() - want).abs() <= allowed)
        assert not bool(wrong.any()), (rows, int(wrong.sum()), wrong.nonzero()[:4].tolist())
        assert bool(room[:1024].isnan().all()) and bool(room[-1024:].isnan().all())


ROWS = (1, 7, 8, 16, 33, 64, 65, 200)
SETTINGS = [
    (Knobs(bm=64, bn=8, bk=128, split=1), "nk", "bfloat16"),
    (Knobs(bm=64, bn=8, bk=64, stages=4, split=8), "nk", "float16"),
    (Knobs(bm=128, bn=16, bk=128, split=2), "kn", "bfloat16"),
    (Knobs(bm=64, bn=16, bk=256, stages=2, split=4), "nk", "bfloat16"),
    (Knobs(bm=64, bn=32, bk=64, split=1), "kn", "float16"),
    (Knobs(bm=128, bn=32, bk=64, split=8), "nk", "bfloat16"),
    (Knobs(bm=128, bn=64, bk=128, stages=2, split=1), "nk", "float16"),
    (Knobs(bm=64, bn=64, bk=64, split=4), "kn", "bfloat16"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("knobs", "layout", "dtype"), SETTINGS, ids=str)
def test_computes_the_block(knobs, layout, dtype) -> None:
    """N and K are just over a tile; some ranks have fewer k steps, or none."""
    n, k = 264, 520
    kernel = built(knobs, n=n, k=k, layout=layout, dtype=dtype)
    for rows in ROWS:
        check(kernel, rows, n, k, getattr(torch, dtype), layout)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_more_blocks_than_k_steps(layout) -> None:
    kernel = built(Knobs(bk=64, split=8), n=72, k=72, layout=layout, dtype="bfloat16")
    for rows in (1, 16, 17):
        check(kernel, rows, 72, 72, torch.bfloat16, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 2])
def test_residual_over_rows_of_two_dimensions_to_float32(split) -> None:
    knobs = Knobs(bn=16, split=split)
    shape = {"n": 136, "k": 520, "layout": "nk"}
    kernel = built(knobs, residual=True, lead=("T",), out="float32", **shape)
    for lead, rows in ((3, 11), (1, 16), (5, 1)):
        check(kernel, rows, 136, 520, torch.bfloat16, "nk", True, [torch.float32], (lead,))


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 4])
def test_writes_two_outputs(split) -> None:
    kernel = built(Knobs(bn=32, split=split), maker=two_outputs, n=136, k=520)
    for rows in (1, 31, 64):
        outs = [torch.float32, torch.bfloat16]
        check(kernel, rows, 136, 520, torch.bfloat16, "kn", outs=outs)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 4])
def test_dependent_kernels_in_a_chain(split) -> None:
    """Each reads what the one before has written, launched while that one still runs."""
    knobs, size = Knobs(bn=16, split=split), 1024
    kernel = built(knobs, True, n=size, k=size, layout="nk", gelu=False)
    make = torch.Generator().manual_seed(split)
    x, w = torch.randn((16, size), generator=make), torch.randn((size, size), generator=make)
    x, w = x.bfloat16().cuda(), (w / size**0.5).bfloat16().cuda()
    b = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    chain = [x, *(torch.full_like(x, float("nan")) for _ in range(20))]
    for source, target in itertools.pairwise(chain):
        kernel(source, w, b, target)
    torch.cuda.synchronize()
    for source, target in itertools.pairwise(chain):
        wanted = source.double() @ w.double().T
        assert bool(((target.double() - wanted).abs() <= 0.0041 * wanted.abs() + 1e-4).all())
