"""Joint graphs: functional, with constants and random numbers as inputs; and how they are cut."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from tests.training_cases import CASES
from tvmcap.base.config import Config
from tvmcap.base.errors import CaptureError
from tvmcap.capture import arguments, autograd, shapes
from tvmcap.capture.partition import Pair, partition, peak_bytes, saved_bytes
from tvmcap.capture.structure import describe
from tvmcap.capture.training import TrainingCapture, capture_training


def joint(fn: Any, *args: torch.Tensor, dynamic: Any = None) -> autograd.Joint:
    call = arguments.freeze(fn, args, {}, ())
    leaves: list[tuple[str, torch.Tensor]] = []
    for name, value in zip(call.names, call.values, strict=True):
        describe(value, name, leaves)
    free = shapes.resolve(dynamic, call.names, leaves)
    return autograd.trace_joint(call, leaves, free, autograd.state_of(fn))


def cut(fn: Any, *args: torch.Tensor, budget: float = 1.0) -> tuple[autograd.Joint, Pair]:
    traced = joint(fn, *args)
    return traced, partition(traced.graph, traced.outputs + len(traced.updates), budget)


def nodes(graph: fx.GraphModule, name: str) -> list[fx.Node]:
    found = [n for n in graph.graph.nodes if n.op == "call_function"]
    return [n for n in found if n.target.__name__.startswith(name)]


def returned(graph: fx.GraphModule) -> list[Any]:
    return list(next(n for n in graph.graph.nodes if n.op == "output").args[0])


def run(graph: fx.GraphModule, *values: torch.Tensor) -> Any:
    """Run a joint graph on its flat inputs."""
    return fx.Interpreter(graph).run(*values, enable_io_processing=False)


def deep(layers: int = 4) -> nn.Module:
    parts = [m for _ in range(layers) for m in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(*parts)


def test_a_joint_graph_is_functional_and_flat() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Flatten(0))
    found = joint(module, torch.randn(2, 4))
    assert found.names == ("0.weight", "0.bias", "input")
    assert found.state == 2 and found.outputs == 1 and found.tangents == (0,)
    assert found.grads == (0, 1)  # the input requires none
    targets = [n.target for n in found.graph.graph.nodes if n.op == "call_function"]
    assert not any(t._schema.is_mutable for t in targets if hasattr(t, "_schema"))
    assert returned(found.graph)[-1] is None


def test_a_function_of_plain_tensors_is_differentiated_by_all_of_them() -> None:
    found = joint(
        lambda x, w, i: torch.index_select(x @ w, 0, i),
        torch.ones(2, 3),
        torch.ones(3, 2),
        torch.tensor([1]),
    )
    assert found.grads == (0, 1)


def test_random_numbers_are_inputs_in_eagers_order() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x, 0.5) * torch.rand_like(x)
        return F.dropout(y.t(), 0.25).t() + torch.randn(3, 5)

    found = joint(fn, torch.ones(3, 5))
    assert [d.operator for d in found.draws] == [
        "dropout",
        "rand_like.default",
        "dropout",
        "randn.default",
    ]
    assert [d.order for d in found.draws] == [(0, 1), (0, 1), (1, 0), (0, 1)]
    assert found.draws[2].numbers == (0.25,)
    tags = [getattr(n.target, "tags", ()) for n in found.graph.graph.nodes]
    assert not any(torch.Tag.nondeterministic_seeded in t for t in tags)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all_draws_nothing(p: float) -> None:
    found = joint(lambda x: F.dropout(x, p), torch.ones(4))
    assert found.draws == ()
    x = torch.randn(4)
    y, gradient = run(found.graph, x, torch.ones(4))
    torch.testing.assert_close(y, F.dropout(x, p))
    torch.testing.assert_close(gradient, torch.full((4,), 1 - p))


def test_constants_of_the_code_become_inputs() -> None:
    held = torch.arange(3.0)
    found = joint(lambda x: x * held, torch.ones(3))
    assert found.names[-1] == "constant0"
    (value,) = found.constants.values()
    torch.testing.assert_close(value, held)


def test_equal_names_are_one_size_and_a_size_that_breaks_the_code_is_named() -> None:
    dynamic = {0: {0: "B"}, 1: {0: "B"}}
    found = joint(lambda x, y: x + y, torch.ones(4, 2), torch.ones(4, 2), dynamic=dynamic)
    sizes = {str(n.meta["val"].shape[0]) for n in found.graph.graph.nodes if n.op == "placeholder"}
    assert len(sizes) == 1
    with pytest.raises(CaptureError, match=r"B = .*breaks it"):
        joint(lambda x: x.view(-1, 2, 3), torch.ones(6), dynamic={0: {0: "B"}})
    with pytest.raises(CaptureError, match="fixes it"):
        joint(lambda x: x + torch.ones(6), torch.ones(6), dynamic={0: {0: "B"}})


def test_at_budget_one_operands_of_products_are_saved_and_nothing_else() -> None:
    _, pair = cut(deep(), torch.randn(8, 16, requires_grad=True))
    saved = returned(pair.forward)[1:]
    own = [n.target.__name__ for n in saved if n.op != "placeholder"]
    assert own.count("gelu.default") == 3 and own.count("addmm.default") == 4
    assert not nodes(pair.backward, "gelu")
    assert len(nodes(pair.backward, "mm")) == 8
    # weights are saved as they lie in memory, and not as a transposed copy
    assert {n.name for n in saved if n.op == "placeholder"} >= {"primals_1", "primals_9"}


def test_below_it_activations_are_computed_again() -> None:
    _, pair = cut(deep(), torch.randn(8, 16, requires_grad=True), budget=0.9)
    own = [n.target.__name__ for n in returned(pair.forward)[1:] if n.op != "placeholder"]
    assert own == ["addmm.default"] * 4
    assert len(nodes(pair.backward, "gelu")) == 3


@pytest.mark.parametrize("case", ["deep", "attention", "convnet", "norm_mlp"])
def test_less_budget_never_needs_or_saves_more_memory(case: str) -> None:
    if case == "deep":
        fn, args = deep(), (torch.randn(64, 16, requires_grad=True),)
    else:
        fn, args, _ = CASES[case]()
    traced = joint(fn, *args)
    count = traced.outputs + len(traced.updates)
    budgets = (1.0, 0.95, 0.8, 0.5, 0.35, 0.3, 0.0)
    pairs = [partition(traced.graph, count, budget) for budget in budgets]
    for measured in (peak_bytes, saved_bytes):
        found = [measured(pair, count) for pair in pairs]
        assert found == sorted(found, reverse=True)
        assert case != "deep" or found[-1] < 0.8 * found[0]


def test_a_cut_that_needs_or_saves_more_than_one_of_more_budget_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # for each tenth of budget, what PyTorch's cut would need and save
    needs = {1.0: (9, 9), 0.9: (7, 5), 0.8: (8, 4), 0.7: (6, 6), 0.6: (7, 3), 0.5: (5, 5)}
    module: Any = sys.modules[partition.__module__]
    monkeypatch.setattr(module, "_cut", lambda graph, outputs, budget: budget)
    monkeypatch.setattr(module, "peak_bytes", lambda pair, outputs: needs.get(pair, (99, 99))[0])
    monkeypatch.setattr(module, "saved_bytes", lambda pair, outputs: needs.get(pair, (99, 99))[1])
    graph: Any = None
    taken = [partition(graph, 1, budget) for budget in (1.0, 0.95, 0.9, 0.75, 0.7, 0.5, 0.0)]
    assert taken == [1.0, 1.0, 0.9, 0.9, 0.9, 0.5, 0.5]


def test_what_is_saved_is_counted_without_inputs_and_outputs() -> None:
    _, pair = cut(deep(), torch.randn(8, 16, requires_grad=True))
    assert saved_bytes(pair, 1) == 7 * 8 * 16 * 4
    output = next(n for n in pair.forward.graph.nodes if n.op == "output")
    _, *saved = output.args[0]
    first = next(n for n in saved if n.op != "placeholder")
    output.args = ((first, *saved),)
    assert saved_bytes(pair, 1) == 6 * 8 * 16 * 4


@pytest.mark.parametrize("budget", [0.0, 0.55, 1.0])
def test_both_parts_compute_what_the_joint_graph_does(budget: float) -> None:
    traced, pair = cut(deep(2), torch.randn(8, 16, requires_grad=True), budget=budget)
    values = [
        torch.randn(n.meta["val"].shape) for n in traced.graph.graph.nodes if n.op == "placeholder"
    ]
    whole = run(traced.graph, *values)
    first = pair.forward(*values[:-1])
    second = pair.backward(*first[1:], values[-1])
    for ours, expected in zip((first[0], *second), whole, strict=True):
        torch.testing.assert_close(ours, expected)


def _captured(fn: Callable[..., Any], *args: torch.Tensor, **options: Any) -> TrainingCapture:
    return capture_training(fn, args, None, Config(backward=True, **options))


def test_the_calling_convention_names_parameters_and_buffers() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    found = _captured(module, torch.randn(5, 4), dynamic={0: {0: "B"}})
    assert found.signature.arg_names == ("input", "parameters")
    names = [spec.name for spec in found.signature.inputs]
    assert names[0] == "input" and "1.running_mean" in names
    assert found.training.updates == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert found.signature.outputs[0].shape == ("B", 3)
    assert {d.name for d in found.backward.entry.signature.dims} == {"B"}


def test_a_size_that_no_tensor_tells_enters_with_a_tensor_of_that_size() -> None:
    found = _captured(lambda x: x.sum(), torch.ones(4, 3), dynamic={0: {0: "B"}})
    spec = found.backward.entry.signature.inputs[-1]
    assert (spec.dtype, spec.shape) == ("uint8", ("B",))
    assert found.backward.entry.inputs[-1].kind == "sized"
