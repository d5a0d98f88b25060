"""Programs and inputs as a shell names them."""

import pytest
import torch

from tvmcap.base.config import Dim
from tvmcap.base.errors import ConfigError
from tvmcap.program import Extent, load_program, parse_input, parse_sizes

SOURCE = """
import torch
import neighbour

def block(x, w, b):
    return torch.relu(x @ w + b)

def scaled(x, w, scale=1.0, t=None):
    return x @ w * scale

def make():
    return torch.nn.Linear(4, 8).train()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 8)

    def forward(self, x, scale=1.0):
        return self.fc(x) * scale

instance = Net()

def examples():
    return torch.ones(2, 4), torch.ones(4, 3), torch.ones(3)

number = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "neighbour.py").write_text("")
    path = tmp_path / "program_under_test.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.mark.parametrize("name", ["make", "Net", "instance"])
def test_modules_and_what_makes_them_come_in_eval_mode_and_repeat(file, name):
    program = load_program(f"{file}:{name}", ["float32[B=2,4]"])
    assert isinstance(program.fn, torch.nn.Module) and not program.fn.training
    assert program.args[0].shape == (2, 4)
    if name != "instance":
        again = load_program(f"{file}:{name}", ["float32[B=2,4]"])
        pairs = zip(program.fn.parameters(), again.fn.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert torch.equal(program.args[0], again.args[0])


def test_inputs_of_a_function(file):
    program = load_program(
        f"{file}:block",
        ["x:f32[B=16..4096,1024]", "w:float32[1024,64]", "b=bf16[64]"],
        dynamic=["b:0=N"],
    )
    x, w, b = program.args
    assert (x.shape, w.shape, b.dtype) == ((16, 1024), (1024, 64), torch.bfloat16)
    assert program.dynamic == {"b": {0: Dim("N")}, "x": {0: Dim("B", max=4096)}}
    assert 0.5 < float((x @ w).std()) < 2
    unnamed = load_program(f"{file}:block", ["f32[2,4]", "f32[4,3]", "f32[3]"])
    assert [tuple(a.shape) for a in unnamed.args] == [(2, 4), (4, 3), (3,)]


def test_inputs_from_a_function(file):
    program = load_program(f"{file}:block", inputs_from=f"{file}:examples")
    assert [tuple(a.shape) for a in program.args] == [(2, 4), (4, 3), (3,)]


def test_arguments_out_of_order_go_by_keyword(file):
    program = load_program(f"{file}:scaled", ["w:f32[4,3]", "x:f32[2,4]"])
    assert len(program.args) == 2 and not program.kwargs
    program = load_program(f"{file}:scaled", ["x:f32[2,4]", "w:f32[4,3]", "t:f32[3]"])
    assert program.args == () and set(program.kwargs) == {"x", "w", "t"}


@pytest.mark.parametrize(
    "name, inputs, message",
    [
        ("{f}:nope", [], "it has block, scaled, make, Net"),
        ("{f}", [], "FILE.py:NAME"),
        ("missing.py:f", [], "no such file"),
        ("no.such.module:f", [], "cannot import"),
        ("{f}:number", [], "got int"),
        ("missing.pt2", [], "no such file"),
        ("{f}:block", ["x:float99[3]"], "unknown dtype"),
        ("{f}:block", ["x float32"], "expected an example input"),
        ("{f}:block", ["x:f32[B]"], "neither 16 nor B=16"),
        ("{f}:block", ["q:f32[3]"], "the arguments are x, w, b"),
        ("{f}:block", ["x:f32[2,4]"], "no example input for w, b: give each one"),
        ("{f}:block", ["x:f32[B=2,4]", "w:f32[B=3,4]"], "B is 2 and 3"),
    ],
)
def test_what_cannot_be_read_is_named(file, name, inputs, message):
    with pytest.raises(ConfigError, match=message):
        load_program(name.format(f=file), inputs)


def test_specifications():
    assert parse_input("ids:int64[B=4, 128]@1000") == (
        "ids", "int64", [Extent(4, "B"), Extent(128)], 1000
    )  # fmt: skip
    assert parse_input("float32[]") == (None, "float32", [], 2)
    assert parse_sizes("B=3, T=5") == {"B": 3, "T": 5} and parse_sizes(None) is None
    with pytest.raises(ConfigError, match="NAME=SIZE"):
        parse_sizes("B:3")
    with pytest.raises(ConfigError, match="ARG:AXIS=NAME"):
        load_program("x.py:f", dynamic=["x=B"])
