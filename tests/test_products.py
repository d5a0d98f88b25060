"""Every way to write a matrix product arrives at one kernel, without a transpose of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.libs import quick, values
from tvmcap import pipeline
from tvmcap.base import codegen
from tvmcap.base.config import make_config
from tvmcap.capture.export import capture
from tvmcap.schedules import gemm_match

TARGETS = {
    "llvm": codegen.make_target("llvm"),
    "cuda": codegen.make_target({"kind": "cuda", "arch": "sm_90a"}),
}
KM, NK = {"a_layout": "km"}, {"layout": "nk"}
BATCH, PAIR = {"batch": (3,)}, {"batch": (2, 3)}
PLAIN = {"a_layout": "mk", "layout": "kn", "batch": (), "a_batched": True, "b_batched": True}
#: name: (function, shapes, what the matcher reads, where it is not ``PLAIN``)
FORMS: dict[str, tuple[Any, tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "x @ w": (lambda x, w: x @ w, ((32, 64), (64, 48)), {}),
    "x @ w.T": (lambda x, w: x @ w.T, ((32, 64), (48, 64)), NK),
    "x.T @ w": (lambda x, w: x.T @ w, ((64, 32), (64, 48)), KM),
    "x.T @ w.T": (lambda x, w: x.T @ w.T, ((64, 32), (48, 64)), KM | NK),
    "rows": (lambda x, w: x @ w, ((3, 32, 64), (64, 48)), {}),
    "rows, w.T": (lambda x, w: x @ w.T, ((3, 32, 64), (48, 64)), NK),
    "batch": (lambda x, y: x @ y, ((2, 3, 32, 64), (2, 3, 64, 48)), PAIR),
    "batch, left": (
        lambda x, y: x.transpose(-1, -2) @ y,
        ((3, 64, 32), (3, 64, 48)),
        KM | BATCH,
    ),
    "batch, right": (
        lambda x, y: x @ y.transpose(-2, -1),
        ((2, 3, 32, 64), (2, 3, 48, 64)),
        NK | PAIR,
    ),
    "left for all": (
        lambda x, y: x @ y,
        ((32, 64), (3, 64, 48)),
        BATCH | {"a_batched": False},
    ),
    "left.T for all": (
        lambda x, y: x.T @ y,
        ((64, 32), (3, 64, 48)),
        KM | BATCH | {"a_batched": False},
    ),
    "right for all": (
        lambda x, y: x.mT @ y,
        ((3, 64, 32), (64, 48)),
        KM | BATCH | {"b_batched": False},
    ),
    "batch of one": (lambda x, y: x @ y, ((3, 32, 64), (1, 64, 48)), {}),
    "mm": (lambda x, w: torch.mm(x, w.t()), ((32, 64), (48, 64)), NK),
    "bmm": (lambda x, y: torch.bmm(x.mT, y.mT), ((3, 64, 32), (3, 48, 64)), KM | NK | BATCH),
    "matrix @ vector": (torch.matmul, ((32, 64), (64,)), NK),
    "vector @ matrix": (torch.matmul, ((64,), (64, 48)), {}),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w.t()), ((48,), (32, 64), (48, 64)), NK),
    "baddbmm": (
        lambda b, x, y: torch.baddbmm(b, x, y.mT, beta=0.5, alpha=2),
        ((3, 32, 48), (3, 32, 64), (3, 48, 64)),
        NK | BATCH,
    ),
    "linear": (F.linear, ((2, 3, 32, 64), (48, 64), (48,)), NK),
    "bik,bkj->bij": (
        lambda x, y: torch.einsum("bik,bkj->bij", x, y),
        ((3, 32, 64), (3, 64, 48)),
        BATCH,
    ),
    "bki,bjk->bij": (
        lambda x, y: torch.einsum("bki,bjk->bij", x, y),
        ((3, 64, 32), (3, 48, 64)),
        KM | NK | BATCH,
    ),
    "ik,kj->ij": (lambda x, y: torch.einsum("ik,kj->ij", x, y), ((32, 64), (64, 48)), {}),
    "ik,jk->ij": (lambda x, y: torch.einsum("ik,jk->ij", x, y), ((32, 64), (48, 64)), NK),
    "ki,kj->ij": (lambda x, y: torch.einsum("ki,kj->ij", x, y), ((64, 32), (64, 48)), KM),
    "btk,nk->btn": (lambda x, y: torch.einsum("btk,nk->btn", x, y), ((3, 32, 64), (48, 64)), NK),
    "bhqd,bhkd->bhqk": (
        lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y),
        ((2, 3, 32, 64), (2, 3, 48, 64)),
        NK | PAIR,
    ),
    "bhqk,bhkd->bhqd": (
        lambda x, y: torch.einsum("bhqk,bhkd->bhqd", x, y),
        ((2, 3, 32, 64), (2, 3, 64, 48)),
        PAIR,
    ),
}  # fmt: skip


def passed(fn, args, kind, **options):
    """Capture and run the passes; returns the fused module, the planned one and the trace."""
    config = make_config(target=kind, tune="none", **options)
    return run_passes(capture(fn, args, None, config).mod, kind, config)


def run_passes(mod, kind, config):
    target, trace = TARGETS[kind], pipeline.Trace()
    front = pipeline.front(target, config.allow_tf32)
    fused = pipeline.run(mod, front, target, config, trace)
    back = pipeline.back(target, lambda task: [], trace)
    return fused, pipeline.run(fused, back, target, config, trace), trace


def products(fused, kind="cuda"):
    """Return what is read of the PrimFuncs that are products."""
    found = [gemm_match.read(f) for g, f in fused.functions.items() if g.name_hint != "main"]
    return [gemm for gemm in found if gemm is not None]


def together(names, then=lambda y: y):
    """Return a function with a result for each form, and its arguments."""

    def block(*args):
        left, results = list(args), []
        for name in names:
            fn, own, _ = FORMS[name]
            results.append(then(fn(*left[: len(own)])))
            del left[: len(own)]
        return tuple(results)

    shapes = [shape for name in names for shape in FORMS[name][1]]
    return block, [values(*shape, seed=i) for i, shape in enumerate(shapes)]


def layouts(fused):
    """Return what is read of the kernel that makes each result, None where it is no product."""
    body = fused["main"].body
    made = {b.var: b.value for block in body.blocks for b in block.bindings}
    found = [gemm_match.read(fused[made[result].args[0]]) for result in body.body.fields]
    return [gemm and {key: getattr(gemm, key) for key in PLAIN} for gemm in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_is_one_kernel_with_what_follows(dtype) -> None:
    block, args = together(FORMS, torch.relu)
    configs = {kind: make_config(target=kind, tune="none") for kind in TARGETS}
    mod = capture(block, [a.to(dtype) for a in args], None, configs["cuda"]).mod
    fused, planned, _ = run_passes(mod, "cuda", configs["cuda"])
    assert dict(zip(FORMS, layouts(fused), strict=True)) == {
        name: PLAIN | wanted for name, (_, _, wanted) in FORMS.items()
    }
    assert pipeline.count_kernels(planned) == len(FORMS)
    fused, planned, trace = run_passes(mod, "llvm", configs["llvm"])
    assert pipeline.count_kernels(planned) == len(FORMS)
    assert {s.served_by for s in trace.coverage if pipeline.calls(planned, s.task)} == {
        "template:cpu_gemm"
    }


@pytest.mark.parametrize("part", range(3))
def test_they_compute_what_torch_does(part) -> None:
    names = list(FORMS)[part::3]
    block, args = together(names)
    lib = quick(block, *args)
    wanted = block(*(a.double() for a in args))
    for name, ours, exact in zip(names, lib(*args), wanted, strict=True):
        assert ours.shape == exact.shape, name
        assert (ours - exact).abs().max() < 1e-4, name


def test_heads_are_moved_once_and_read_in_place() -> None:
    """Transposes of other dimensions than the last two stay kernels."""
    args = values(2, 32, 3, 64), values(2, 48, 3, 64)
    fn = lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k)  # noqa: E731
    fused, planned, _ = passed(fn, args, "cuda")
    assert pipeline.count_kernels(planned) == 3 and len(products(fused)) == 1
    lib = quick(fn, *args)
    torch.testing.assert_close(lib(*args), fn(*args), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_frozen_weight_meets_a_transposed_activation(kind) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 48)

        def forward(self, x):
            return torch.relu(self.linear(x.mT))

    net, x = Net().eval(), values(3, 64, 32)
    fused, planned, _ = passed(net, (x,), kind)
    assert pipeline.count_kernels(planned) == 1
    if kind == "llvm":
        torch.testing.assert_close(quick(net, x)(x), net(x), atol=1e-4, rtol=1e-4)
    else:
        (gemm,) = products(fused)
        assert (gemm.a_layout, gemm.layout, gemm.b_batched) == ("km", "kn", False)


def block(x, w):
    return torch.relu(x @ w)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("allowed", [True, False])
def test_allow_tf32_reaches_the_kernel_and_packs_the_weight(frozen, allowed) -> None:
    options = {"constants": ("w",)} if frozen else {}
    args = values(32, 64), values(64, 48)
    fused, planned, trace = passed(block, args, "cuda", allow_tf32=allowed, **options)
    (gemm,) = products(fused)
    assert gemm.tf32 == allowed and pipeline.count_kernels(planned) == 1
    assert gemm.layout == ("nk" if frozen and allowed else "kn")
    if frozen and allowed:
        assert [s.served_by for s in trace.coverage] == ["template:hopper_gemm"]
    if not frozen:  # an argument in [K, N] order is no operand for tf32
        (served,) = trace.coverage
        assert served.served_by == "template:simt_gemm"
        assert ("K innermost" in served.reason) == allowed


def test_allow_tf32_is_for_float32_and_changes_nothing_on_llvm() -> None:
    half = values(32, 64).bfloat16(), values(48, 64).bfloat16()
    (gemm,) = products(passed(lambda x, w: x @ w.T, half, "cuda", allow_tf32=True)[0])
    assert not gemm.tf32
    args = values(32, 64), values(64, 48)
    plain, allowed = (
        passed(block, args, "llvm", allow_tf32=value)[0].script() for value in (False, True)
    )
    assert plain == allowed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "tf32"], ids=str)
@pytest.mark.parametrize("part", range(3))
def test_on_the_gpu_they_are_within_the_budget(part, dtype) -> None:
    """``build`` verifies each output against the error budget of its dtype, or of tf32."""
    names = [name for name in list(FORMS)[part::3] if "vector" not in name]
    many, args = together(names, torch.relu)
    tf32 = dtype == "tf32"
    kept = torch.float32 if tf32 else dtype
    args = [a.to(kept).cuda() for a in args]
    lib = quick(many, *args, target="cuda", allow_tf32=tf32, verify=True)
    assert lib.manifest.verified


@pytest.mark.gpu
def test_tf32_on_tensor_cores_is_within_its_budget_and_beyond_that_of_float32() -> None:
    x, w = values(256, 2048).cuda(), values(512, 2048).cuda()
    fn = lambda x, w: x @ w.T  # noqa: E731
    lib = quick(fn, x, w, target="cuda", allow_tf32=True, verify=True)
    assert lib.manifest.verified
    assert [task["served_by"] for task in lib.manifest.coverage] == ["template:hopper_gemm"]
    exact = x.double() @ w.double().T
    error = (lib(x, w).double() - exact).abs().max()
    assert 2 * (fn(x, w).double() - exact).abs().max() < error < 0.2
