"""Custom operators: lowerings in Relax and TE, PyTorch's kernel, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tvm import relax, te

import tvmcap
from tvmcap import dynamo
from tvmcap.base.errors import CaptureError, ConfigError, LibraryError
from tvmcap.capture import custom

QUICK = {"target": "llvm", "tune": "none", "dynamic": {0: {0: "B"}}}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@torch.library.custom_op("tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    """Multiply."""
    return x * by


@torch.library.custom_op("tests::sorted_pair", mutates_args=())
def sorted_pair(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort, and multiply in another dtype."""
    return x.sort(-1).values, (x * n).to(torch.bfloat16)


@torch.library.custom_op("tests::without_meta", mutates_args=())
def without_meta(x: torch.Tensor) -> torch.Tensor:
    """Add one."""
    return x + 1


@torch.library.custom_op("tests::changes", mutates_args=("x",))
def changes(x: torch.Tensor) -> None:
    """Add one in place."""
    x.add_(1)


scaled.register_autograd(
    lambda ctx, g: (g * ctx.by, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
)


def fn(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.tests.scaled(x + 1, 3.0).exp()


@pytest.fixture(autouse=True)
def registered() -> Any:
    torch._dynamo.reset()
    yield
    custom._REGISTERED.clear()


LOWERINGS = {
    "relax": lambda x, by: relax.op.multiply(x, relax.const(by, "float32")),
    "te": lambda x, by: te.compute(x.shape, lambda *i: x[i] * by),
    "eager": "eager",
}


@pytest.mark.parametrize("kind", LOWERINGS)
def test_a_lowering_serves_build_and_torch_compile(kind: str, caplog: Any) -> None:
    tvmcap.register_op(
        "tests::scaled", meta=lambda x, by=2.0: torch.empty_like(x), lower=LOWERINGS[kind]
    )
    x = torch.rand(4, 3)
    lib = tvmcap.build(fn, (x,), **QUICK)
    assert lib.manifest.verified
    assert bool(lib.manifest.needs) == (kind == "eager")
    more = torch.rand(9, 3)
    torch.testing.assert_close(lib(more), fn(more))
    caplog.clear()
    leaf = x.clone().requires_grad_()
    y = torch.compile(fn, backend=dynamo.backend, options={"tune": "none"})(leaf)
    torch.testing.assert_close(y, fn(x))
    ours, eager = (torch.autograd.grad(z.sum(), leaf)[0] for z in (y, fn(leaf)))
    torch.testing.assert_close(ours, eager)
    assert not [r for r in caplog.records if r.name == "tvmcap"]


def test_another_lowering_is_another_library() -> None:
    meta = {"meta": lambda x, by=2.0: torch.empty_like(x)}
    tvmcap.register_op("tests::scaled", **meta, lower=LOWERINGS["relax"])
    x = torch.rand(4, 3)
    right = tvmcap.build(fn, (x,), **QUICK)
    tvmcap.register_op("tests::scaled", **meta, lower=lambda x, by: relax.op.negative(x))
    wrong = tvmcap.build(fn, (x,), verify=False, **QUICK)
    assert wrong.path != right.path
    torch.testing.assert_close(wrong(x), (-(x + 1)).exp())


def test_torchs_kernel_with_two_results_and_what_the_file_says(
    tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    def pair(x: torch.Tensor) -> Any:
        a, b = torch.ops.tests.sorted_pair(x * 2, 3)
        return a.exp(), b + 1

    def meta(x: torch.Tensor, n: int) -> Any:
        return torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)

    tvmcap.register_op("tests::sorted_pair", meta=meta, lower="eager")
    x = torch.rand(4, 3)
    lib = tvmcap.build(pair, (x,), **QUICK)
    for ours, eager in zip(lib(x), pair(x), strict=True):
        torch.testing.assert_close(ours, eager)
    caplog.clear()
    path = lib.export(tmp_path / "pair.so")
    (line,) = [r.getMessage() for r in caplog.records if r.name == "tvmcap"]
    assert "does not run with TVM's runtime alone" in line and "tests::sorted_pair" in line
    assert "needs      torch, custom operator tests::sorted_pair" in lib.inspect("manifest")
    assert torch.equal(tvmcap.load(path)(x)[1], lib(x)[1])
    monkeypatch.setattr("tvmcap.runtime.vendor._find", lambda name: None)
    with pytest.raises(LibraryError, match="tests::sorted_pair, which is not there"):
        tvmcap.load(path)


def test_a_lowering_that_fails() -> None:
    tvmcap.register_op(
        "tests::scaled", meta=lambda x, by=2.0: torch.empty_like(x), lower=lambda x, by: 3
    )
    with pytest.raises(CaptureError, match=r"tests::scaled"):
        tvmcap.build(fn, (torch.rand(4, 3),), **QUICK)


@pytest.mark.parametrize(
    ("name", "lower", "said"),
    [
        ("tests::without_meta", "eager", "has no meta function"),
        ("tests::missing", "eager", "there is no operator"),
        ("scaled", "eager", "expected 'namespace::name'"),
        ("tests::changes", "eager", "changes an argument in place"),
        ("tests::scaled", 3, "expected a function of Relax values"),
    ],
)
def test_what_is_refused(name: str, lower: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tvmcap.register_op(name, lower=lower)


def test_torch_compile_names_an_operator_without_meta() -> None:
    fast = torch.compile(lambda x: without_meta(x.exp()), backend=dynamo.backend)
    with pytest.raises(Exception, match=r"no fake impl registered.*without_meta"):
        fast(torch.ones(3))
