"""The backend of torch.compile: inference, training, options, what stays with PyTorch."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tvmcap
from tests.compiling import compiled
from tests.training_cases import Attention, ConvNet
from tvmcap import dynamo
from tvmcap.base.config import Config
from tvmcap.base.errors import ConfigError
from tvmcap.capture import ir

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import batches  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def warned(caplog: Any) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "tvmcap"]


def test_torch_finds_the_backend_by_its_name(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (found,) = importlib.metadata.Distribution.discover(path=[str(tmp_path)])
    (entry,) = found.entry_points.select(group="torch_dynamo_backends")
    assert entry.name == "tvmcap" and entry.load() is dynamo.backend
    program = (
        "import torch, tvmcap.dynamo\n"
        "assert 'tvmcap' in torch._dynamo.list_backends()\n"
        "from torch._dynamo.backends.registry import lookup_backend\n"
        "assert lookup_backend('tvmcap') is tvmcap.dynamo.backend"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("make", [Attention, ConvNet], ids=["attention", "convnet"])
def test_a_step_of_training_is_eagers(make: Any, caplog: Any) -> None:
    model, twin = make(), make()
    twin.load_state_dict(model.state_dict())
    shape = (3, 5, 16) if make is Attention else (2, 3, 8, 8)
    fast, x = compiled(model), torch.randn(shape)
    for module, fn in ((model, fast), (twin, twin)):
        step = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            step.zero_grad()
            fn(x).square().mean().backward()
            step.step()
    for (name, a), b in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):  # running statistics too
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    assert not warned(caplog)


class Writer(nn.Module):
    """A language model of characters: one attention layer with dropout."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(letters, 16), Attention()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, letters)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.embed(x)
        z = z + F.dropout(self.attend(self.norm(z)), 0.1, self.training)
        return F.cross_entropy(self.head(z).flatten(0, 1), y.flatten())


def test_a_language_model_learns_as_in_eager() -> None:
    text = (ROOT / "LICENSE").read_text()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    start = Writer(len(letters)).state_dict()

    def losses(compile_it: bool) -> list[float]:
        model = Writer(len(letters))
        model.load_state_dict(start)
        fn = compiled(model) if compile_it else model
        step = torch.optim.AdamW(model.parameters(), lr=0.02)
        torch.manual_seed(1)
        found = []
        for _ in range(40):
            rows = torch.stack([data[i : i + 17] for i in torch.randint(len(data) - 17, (8,))])
            loss = fn(rows[:, :-1], rows[:, 1:])
            step.zero_grad()
            loss.backward()
            step.step()
            found.append(loss.item())
        return found

    ours, eager = losses(True), losses(False)
    torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)
    assert eager[-1] < 0.85 * eager[0]


def test_weights_are_never_frozen() -> None:
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    fast = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        model.weight.add_(1.0)
        torch.testing.assert_close(fast(x), model(x))


def test_random_batch_sizes_compile_twice() -> None:
    found = batches.measure(60)
    assert found["graphs"] == 2 and found["later"] == 0


def test_dropout_draws_what_eager_draws(caplog: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 2))
    fast, x, found = compiled(model, memory_budget=0.5), torch.randn(6, 8), []
    for fn in (fast, model):
        torch.manual_seed(3)
        y = fn(x)
        found.append([y, *torch.autograd.grad(y.sum(), list(model.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not warned(caplog)


def test_what_has_no_lowering_stays_with_torch_and_one_warning_names_it(caplog: Any) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cdist((x * 2).exp(), x.tanh()).sum(1).sigmoid() * 3

    fast = compiled(fn)
    for rows in (4, 7, 9):
        x = torch.rand(rows, 3, requires_grad=True)
        y = fast(x)
        torch.testing.assert_close(y, fn(x), rtol=1e-4, atol=1e-5)
        ours, eager = (torch.autograd.grad(z.sum(), x)[0] for z in (y, fn(x)))
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4)
    forward = [line for line in warned(caplog) if "cdist_forward" in line]
    assert len(forward) == 1 and "no lowering" in forward[0] and "test_dynamo.py" in forward[0]
    assert len(warned(caplog)) == len(set(warned(caplog))) <= 2  # the other is its gradient's


def test_a_call_that_the_importer_refuses_stays_with_torch(caplog: Any) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.max_pool2d(x, 2, return_indices=True)[1] + 1).float().exp()

    x = torch.rand(1, 2, 4, 4)
    torch.testing.assert_close(compiled(fn)(x), fn(x))
    (line,) = warned(caplog)
    assert "max_pool2d_with_indices" in line


def test_what_the_caller_sees_has_eagers_strides() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x * 2).t()
        return y, y[1:], x.view(-1), x

    x = torch.randn(3, 4)
    for ours, eager in zip(compiled(fn)(x), fn(x), strict=True):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager)
    assert compiled(fn)(x)[3] is x


def test_changes_in_place_are_made() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    a, b = torch.ones(3), torch.ones(3)
    torch.testing.assert_close(compiled(fn)(a), fn(b))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_bugdet": 0.5}, "did you mean 'memory_budget'"),
        ({"dynamic": {}}, "mark_dynamic"),
        ({"quantize": "int8"}, "tvmcap.build"),
        ({"target": "cuda:sm_90a"}, "the tensors are on cpu"),
        ({"disable": ("everything",)}, "the passes that can be left out"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said) as caught:
        torch.compile(lambda x: x * 2, backend=dynamo.backend, options=options)(torch.ones(2))
    assert isinstance(caught.value.inner_exception, ConfigError)


def test_modes() -> None:
    assert dynamo.read_options("max-autotune", None).tune == 64
    assert dynamo.read_options("max-autotune", {"tune": 8}).tune == 8
    assert dynamo.read_options(None, {"memory_budget": 0.2}).memory_budget == 0.2
    with pytest.raises(ConfigError, match="CUDA graphs"):
        dynamo.read_options("reduce-overhead", None)


def test_options_of_the_environment_that_mean_nothing_here(monkeypatch: Any) -> None:
    monkeypatch.setenv("TVMCAP_BACKWARD", "1")
    monkeypatch.setenv("TVMCAP_SEED", "7")
    assert dynamo.read_options(None, None) == Config(seed=7)


def test_a_graph_without_tensor_inputs() -> None:
    assert torch.equal(compiled(lambda: torch.arange(4) * 2)(), torch.arange(4) * 2)
    assert compiled(lambda n: n + 1)(3) == 4


def test_tensors_on_two_devices() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y

    x, y = torch.ones(3), torch.ones(3, device="meta")
    with pytest.raises(RuntimeError, match="device"):
        fn(x, y)
    with pytest.raises(RuntimeError, match="device"):
        compiled(fn)(x, y)
    alone = compiled(lambda x, y: (x * 2, y * 2))(x, y)
    assert torch.equal(alone[0], x * 2) and alone[1].device.type == "meta"


def test_an_integer_cannot_require_grad() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.clone().requires_grad_() * 2

    for run in (fn, compiled(fn)):
        with pytest.raises(RuntimeError, match="floating point"):
            run(torch.ones(3, dtype=torch.int64))


def test_a_leaf_changed_in_place() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    for run in (fn, compiled(fn)):
        with pytest.raises(RuntimeError, match="leaf Variable"):
            run(torch.ones(3, requires_grad=True))


def test_random_operators_have_no_lowering_of_ours() -> None:
    from tvmcap.capture.random import is_random

    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.native_dropout.default, ())
    assert is_random(node) and "native_dropout.default" in ir.known_operators()


def test_graph_breaks_are_handled_and_listed() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(x * 2)
        if y.sum() > 0:
            y = y - 1
        print("between")
        return y.exp()

    x = torch.randn(5)
    torch.testing.assert_close(compiled(fn)(x), fn(x))
    report = tvmcap.explain_capture(fn, (x,))
    assert len(report.breaks) == 2 and report.graphs == 3 + (fn(x).sum() > 1e9)
    branch, output = report.breaks
    assert branch.code == "if y.sum() > 0:" and "torch.where" in branch.advice
    assert output.code == 'print("between")' and Path(output.file) == Path(__file__)
    assert f"{__file__}:{output.line}" in str(report)
    assert report.to_json()["breaks"][0]["line"] == branch.line
    assert "no breaks" in str(tvmcap.explain_capture(nn.Linear(5, 2), (x,)))
    counted = tvmcap.explain_capture(lambda x: F.relu(x.sum() * 2).exp(), (x,))
    assert counted.operators == 4 and "1 graph of 4 operators" in str(counted)  # methods, too


def test_explain_capture_of_what_fails() -> None:
    with pytest.raises(tvmcap.errors.CaptureError, match=r"failed at .*test_dynamo.py"):
        tvmcap.explain_capture(lambda x: x @ x, (torch.ones(2, 3),))
    with pytest.raises(tvmcap.errors.CaptureError, match="expected a function"):
        tvmcap.explain_capture(3, ())


def test_inspect_lists_breaks_from_a_shell(tmp_path: Path, capsys: Any) -> None:
    from tvmcap import cli

    file = tmp_path / "broken.py"
    file.write_text("def fn(x):\n    if x.sum() > 0:\n        return x + 1\n    return x - 1\n")
    command = ["inspect", f"{file}:fn", "--input", "x:float32[4]", "--show", "breaks"]
    assert cli.main(command) == 0
    assert f"{file}:2: if x.sum() > 0:" in capsys.readouterr().out
    for parts, said in (("breaks,tir", "stands alone"), ("breakz", "kernels, .*breaks")):
        assert cli.main([*command[:-1], parts]) == 2
        assert re.search(said, capsys.readouterr().err)
