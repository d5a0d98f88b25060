"""build(..., backward=True): a library that takes part in autograd as eager does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tvmcap
from tests.training_cases import CASES, mlp
from tvmcap.base.errors import CaptureError, ConfigError, InputError, LibraryError, MutationError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def build(fn: Any, args: Any, dynamic: Any = None, **options: Any) -> Any:
    given = {"target": "llvm", "tune": "none", "verify": False, **options}
    return tvmcap.build(fn, args, backward=True, dynamic=dynamic, **given)


@pytest.fixture(scope="module")
def trained() -> tuple[Any, nn.Module]:
    """The MLP with dropout, and its library for any batch."""
    torch.manual_seed(0)
    module, args, dynamic = mlp()
    return build(module, args, dynamic), module


def gradients(module: nn.Module, call: Any, x: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    """Outputs, then the gradients of x and of the parameters, of a weighted sum."""
    x = x.detach().requires_grad_()
    torch.manual_seed(seed)
    y = call(x)
    weights = torch.linspace(-1, 1, y.numel()).view_as(y)
    found = torch.autograd.grad((y * weights).sum(), [x, *module.parameters()])
    return [y.detach(), *found]


@pytest.mark.parametrize("case", list(CASES))
def test_outputs_and_gradients_are_within_twice_eagers_error(case: str, trained: Any) -> None:
    fn, args, dynamic = CASES[case]()
    lib = trained[0] if case == "mlp" else build(fn, args, dynamic)
    report = tvmcap.verify(lib, seed=torch.seed() % 1000)
    assert report.reference == "float64"
    assert len(report.checks) >= 2
    report.require()
    names = [o.name for o in report.checks[0].outputs]
    assert any(name.startswith("gradient of") for name in names)


@pytest.mark.parametrize("case", ["block", "attention"])
def test_gradients_in_16_bits_are_within_twice_eagers_error(case: str) -> None:
    fn, args, _ = CASES[case]()
    fn = fn.bfloat16() if isinstance(fn, nn.Module) else fn
    args = tuple(a.detach().bfloat16().requires_grad_() for a in args)
    tvmcap.verify(build(fn, args), seed=torch.seed() % 1000).require()


class _TwoBiases(nn.Module):
    """Both biases have the same gradient, and the result is saved for it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.a + self.b)


def test_one_gradient_of_two_parameters_and_a_result_that_is_saved() -> None:
    module, x = _TwoBiases(), torch.randn(3, 4)
    lib = build(module, (x.requires_grad_(),))
    ours, eager = gradients(module, lib, x), gradients(module, module, x)
    for mine, wanted in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, wanted)
    assert ours[-1].data_ptr() != ours[-2].data_ptr()


@pytest.mark.parametrize("batch", [1, 6, 130])
def test_dropout_is_what_eager_draws_under_the_same_seed(trained: Any, batch: int) -> None:
    lib, module = trained
    x = torch.randn(batch, 16)
    for ours, eager in zip(
        gradients(module, lib, x, 5), gradients(module, module, x, 5), strict=True
    ):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    other = gradients(module, lib, x, 6)[0]
    assert not torch.allclose(other, gradients(module, lib, x, 5)[0])


def test_backward_fills_the_modules_own_gradients(trained: Any) -> None:
    lib, module = trained
    module.zero_grad()
    x = torch.randn(4, 16)
    lib(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    with torch.no_grad():
        for p in module.parameters():
            p -= 0.1 * p.grad
    module.zero_grad()
    torch.manual_seed(1)
    ours = lib(x)
    torch.manual_seed(1)
    torch.testing.assert_close(ours, module(x), rtol=1e-4, atol=1e-5)  # it reads the new weights


def test_a_library_used_twice_adds_up(trained: Any) -> None:
    lib, module = trained
    module.zero_grad()
    x = torch.randn(4, 16, requires_grad=True)
    torch.manual_seed(2)
    y = lib(x)
    (y.sum() + 2 * y.mean() + lib(x).pow(2).sum()).backward()
    ours = x.grad.clone()
    x.grad = None
    torch.manual_seed(2)
    z = module(x)
    (z.sum() + 2 * z.mean() + module(x).pow(2).sum()).backward()
    torch.testing.assert_close(ours, x.grad, rtol=1e-4, atol=1e-5)


def test_backward_runs_again_where_the_graph_is_kept(trained: Any) -> None:
    lib, _ = trained
    x = torch.randn(3, 16, requires_grad=True)
    y = lib(x).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_without_gradients_nothing_is_recorded(trained: Any) -> None:
    lib, _ = trained
    with torch.no_grad():
        assert lib(torch.randn(2, 16, requires_grad=True)).grad_fn is None


def test_a_saved_tensor_that_changes_is_noticed(trained: Any) -> None:
    lib, _ = trained
    x = torch.randn(3, 16)
    y = lib(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_loaded_library_takes_the_parameters(trained: Any, tmp_path: Path) -> None:
    lib, module = trained
    lib.export(tmp_path / "mlp.so")
    loaded = tvmcap.load(tmp_path / "mlp.so")
    own = dict(module.named_parameters())
    x = torch.randn(5, 16)
    for ours, eager in zip(
        gradients(module, lambda x: loaded(x, parameters=own), x),
        gradients(module, lib, x),
        strict=True,
    ):
        torch.testing.assert_close(ours, eager)
    saved = loaded.manifest.training.saved
    assert {s.source for s in saved} == {"input", "own"}
    assert all(s.dtype in ("float32", "bool") for s in saved)
    with pytest.raises(InputError, match="parameters"):
        loaded(x)


def test_the_scoreboard_covers_both_entries(trained: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("tvmcap.training_score._torch_compile", lambda fn: {})  # seconds of its own
    lib, _ = trained
    score = lib.scoreboard({"B": 8})
    names = [k.name for k in score.per_kernel]
    assert score.kernels == score.kernels_traced == len(names)
    assert {name.partition("_")[0] for name in names} == {"forward", "backward"}
    assert score.peak_bytes_measured == score.peak_bytes_planned
    assert score.eager_us is not None and score.latency_us is not None
    assert "saved for the backward" in lib.explain()


def test_a_profile_times_the_kernels_of_both_entries(trained: Any) -> None:
    lib, _ = trained
    x = torch.randn(9, 16)
    found = lib.profile(x, calls=3)
    assert [k.name for k in found.kernels] == list(lib.executor.kernel_launches(x))
    assert {k.name.partition("_")[0] for k in found.kernels} == {"forward", "backward"}
    assert found.sizes == {"B": 9} and len(found.calls_us.samples) == 3
    assert all(k.nbytes > 0 and len(k.us.samples) == 3 for k in found.kernels)
    with pytest.raises(InputError, match="16"):
        lib.profile(torch.randn(9, 5))


def test_a_step_gives_the_gradients_of_a_sum(trained: Any) -> None:
    lib, module = trained
    x = torch.randn(5, 16, requires_grad=True)
    torch.manual_seed(3)
    *own, by_x = lib.executor.step(x)
    torch.manual_seed(3)
    expected = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    for ours, eager in zip((by_x, *own), expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_memory_for_the_gradient_is_made_by_the_thread_that_needs_it(
    trained: Any, tmp_path: Path
) -> None:
    lib, module = trained
    loaded = tvmcap.load(lib.export(tmp_path / "mlp.so"))
    loaded.executor.use_module(module)
    y = loaded(torch.randn(4, 16))
    assert loaded.executor.arena_bytes == loaded.executor.forward.executor.arena_bytes
    y.sum().backward()
    assert loaded.executor.backward.executor.arena_bytes > 0
    both = [e.executor.arena_bytes for e in (loaded.executor.forward, loaded.executor.backward)]
    assert loaded.executor.arena_bytes == sum(both)


def test_batch_norm_updates_its_statistics_as_eager_does() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    eager = copy.deepcopy(module)
    lib = build(module, (torch.randn(5, 6),))
    for _ in range(2):
        x = torch.randn(5, 6)
        torch.testing.assert_close(lib(x), eager(x), rtol=1e-4, atol=1e-5)
    for (name, ours), theirs in zip(module.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert module[1].num_batches_tracked == 2


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = build(lambda x: x * x, (torch.randn(8, requires_grad=True),))
    lib.executor.backward.executor, real = (
        lambda *t: tuple(1.001 * r for r in real(*t)),
        lib.executor.backward.executor,
    )
    report = tvmcap.verify(lib)
    assert not report.ok
    assert "gradient of x" in str(report)


def test_inputs_that_require_grad_get_it_and_others_do_not() -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 2, requires_grad=True)
    index = torch.tensor([0, 1, 1])
    lib = build(lambda x, w, i: F.cross_entropy(x @ w, i), (x, w, index))
    loss = lib(x, w, index)
    loss.backward()
    expected = torch.autograd.grad(F.cross_entropy(x @ w, index), w)[0]
    torch.testing.assert_close(w.grad, expected)
    with pytest.raises(InputError, match="'x' requires grad, but the library has no gradient"):
        lib(x.clone().requires_grad_(), w, index)
    lib.close()
    with pytest.raises(LibraryError, match="closed"):  # before it is seen that w is missing
        lib(x)


def test_gradients_of_a_sum_know_the_batch() -> None:
    lib = build(lambda x: x.sum(), (torch.randn(4, 3, requires_grad=True),), {0: {0: "B"}})
    x = torch.randn(7, 3, requires_grad=True)
    lib(x).backward()
    torch.testing.assert_close(x.grad, torch.ones(7, 3))


class _Straight(torch.autograd.Function):
    """Rounds, and lets gradients pass as they are, doubled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def test_a_custom_autograd_function_keeps_its_own_gradient() -> None:
    x = torch.randn(5, requires_grad=True)
    lib = build(lambda x: _Straight.apply(3 * x), (x,))
    lib(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((5,), 6.0))


_HELD = torch.randn(3, requires_grad=True)


def _branches(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def _writes(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2) + 1


@pytest.mark.parametrize(
    ("fn", "args", "error", "says"),
    [
        (_branches, (torch.randn(3, requires_grad=True),), CaptureError, "branches on"),
        (_writes, (torch.randn(3, requires_grad=True),), MutationError, "leaf Variable"),
        (lambda x, w: _writes(x) * w, (torch.ones(3), _HELD), MutationError, "in place"),
        (lambda: torch.ones(3), (), CaptureError, "nothing to differentiate"),
        (lambda i: i + 1, (torch.arange(3),), CaptureError, "nothing to differentiate"),
        (lambda x: (x > 0).float(), (torch.ones(3),), CaptureError, "no output depends"),
        (lambda x: x * _HELD, (torch.ones(3),), CaptureError, "is no argument"),
        (lambda x: torch.multinomial(x.abs(), 1) * x, (torch.ones(3),), CaptureError, "random"),
    ],
    ids=["branch", "leaf", "argument", "no tensors", "integers", "constant", "closure", "random"],
)
def test_what_cannot_be_differentiated_is_said(fn: Any, args: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        build(fn, args)


def test_options_that_gradients_rule_out() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        build(lambda x: x * 2, (torch.ones(3),), quantize="int8")
    with pytest.raises(ConfigError, match="a number from 0"):
        build(lambda x: x * 2, (torch.ones(3),), memory_budget=-0.1)
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    with pytest.raises(CaptureError, match=r"the nn\.Module itself"):
        build(program, None)
