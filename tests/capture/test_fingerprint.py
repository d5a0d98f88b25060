"""The compile cache's key: what must change it, what must not."""

from __future__ import annotations

import functools
import importlib
import sys
import textwrap

import pytest
import torch
from torch import nn

from tvmcap.base.config import Config, Dim
from tvmcap.capture.fingerprint import fingerprint

X = torch.randn(4, 8)


def load(tmp_path, monkeypatch, source, name="tvmcap_user_code"):
    """Import ``source`` as a fresh user module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


BASE = """
import torch
import torch.nn.functional as F

SCALE = 2.0
TABLE = {"a": [1, 2]}

def helper(x):
    return F.gelu(x) * SCALE

class Settings:
    def __init__(self):
        self.power = 2
    def apply(self, x):
        return x ** self.power

settings = Settings()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.linear(x) + 1

def fn(x, limit=3):
    return settings.apply(helper(x)) + TABLE["a"][0]

def outer(value):
    def inner(x):
        return x * value
    return inner
"""

EDITS = {
    "helper": ("F.gelu(x) * SCALE", "F.gelu(x) + SCALE"),
    "global": ("SCALE = 2.0", "SCALE = 3.0"),
    "nested": ('"a": [1, 2]', '"a": [5, 2]'),
    "attribute": ("self.power = 2", "self.power = 3"),
    "method": ("x ** self.power", "x * self.power"),
    "default": ("limit=3", "limit=4"),
    "callee": ("F.gelu", "F.relu"),
}


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_edits_change_the_key(edit, tmp_path, monkeypatch):
    before = fingerprint(load(tmp_path, monkeypatch, BASE).fn, (X,))
    assert fingerprint(load(tmp_path, monkeypatch, BASE).fn, (X,)) == before
    assert fingerprint(load(tmp_path, monkeypatch, BASE.replace(*EDITS[edit])).fn, (X,)) != before


def test_comments_and_moved_lines_do_not(tmp_path, monkeypatch):
    before = fingerprint(load(tmp_path, monkeypatch, BASE).fn, (X,))
    assert fingerprint(load(tmp_path, monkeypatch, "# a comment\n\n" + BASE).fn, (X,)) == before


def test_unrelated_globals_do_not(tmp_path, monkeypatch):
    before = fingerprint(load(tmp_path, monkeypatch, BASE).fn, (X,))
    assert fingerprint(load(tmp_path, monkeypatch, BASE + "\nOTHER = 5\n").fn, (X,)) == before


def test_module_code_and_weights(tmp_path, monkeypatch):
    module = load(tmp_path, monkeypatch, BASE)
    model = module.Model()
    before = fingerprint(model, (X,))
    assert fingerprint(module.Model(), (X,)) == before
    with torch.no_grad():
        model.linear.weight[3, 3] += 1e-3
    assert fingerprint(model, (X,)) != before
    edited = load(tmp_path, monkeypatch, BASE.replace("+ 1", "+ 2"))
    assert fingerprint(edited.Model(), (X,)) != before
    assert fingerprint(module.Model().double(), (X,)) != before


def test_training_flag_and_structure():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    before = fingerprint(model, (X,))
    assert fingerprint(model.eval(), (X,)) != before
    model[1].p = 0.2
    assert fingerprint(model.train(), (X,)) != before


def test_closures_and_partials(tmp_path, monkeypatch):
    module = load(tmp_path, monkeypatch, BASE)
    keys = [
        fingerprint(module.outer(v), (X,)) for v in (2, 3, 2.0, True, torch.ones(1), torch.zeros(1))
    ]
    assert len(set(keys)) == len(keys)
    assert fingerprint(module.outer(2), (X,)) == keys[0]
    assert fingerprint(functools.partial(module.fn, limit=1), (X,)) != fingerprint(
        functools.partial(module.fn, limit=2), (X,)
    )


def test_big_weights_count_in_full():
    big = torch.zeros(1 << 19)

    def key():
        return fingerprint(lambda x: x + big.sum(), (X,))

    first = key()
    assert key() == first
    big[-1] = 1
    assert key() != first


def test_arguments():
    def fn(x, y=None, n=1):
        return x

    def key(*args, dynamic=None, constants=(), **kwargs):
        return fingerprint(fn, args, kwargs, Config(dynamic=dynamic, constants=constants))

    free = {"x": {0: "B"}}
    base = key(X, dynamic=free)
    assert key(torch.randn(9, 8), dynamic=free) == base
    assert key(torch.randn(1, 8), dynamic={0: {0: "B"}}) == base
    different = [
        key(X),
        key(torch.randn(9, 8)),
        key(torch.randn(4, 9), dynamic=free),
        key(X.double(), dynamic=free),
        key(X, dynamic={"x": {0: "C"}}),
        key(X, dynamic={"x": {0: Dim("B", max=64)}}),
        key(X, X),
        key(X, (X,)),
        key(X, [X]),
        key(X, {"a": X}),
        key(X, {"b": X}),
        key(X, n=2),
        key(X, n=2.0),
        key(X, n=True),
        key(X, torch.ones(2), constants=("y",)),
        key(X, torch.zeros(2), constants=("y",)),
    ]
    assert len({base, *different}) == len(different) + 1


def test_files_and_programs(tmp_path):
    torch.manual_seed(0)
    programs = [torch.export.export(nn.Linear(8, n), (X,)) for n in (4, 5)]
    keys = []
    for i, program in enumerate(programs):
        torch.export.save(program, tmp_path / f"{i}.pt2")
        keys += [fingerprint(program), fingerprint(tmp_path / f"{i}.pt2")]
        assert keys[-2:] == [fingerprint(program), fingerprint(str(tmp_path / f"{i}.pt2"))]
    assert len(set(keys)) == 4


def test_what_cannot_be_read_never_matches():
    lock = __import__("threading").Lock()

    def fn(x):
        with lock:
            return x

    assert fingerprint(fn, (X,)) != fingerprint(fn, (X,))


def test_autocast_and_its_dtype():
    def key(dtype):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return fingerprint(lambda x: x @ x.T, (X,))

    keys = [key(dtype) for dtype in (torch.bfloat16, torch.float16, None)]
    assert len(set(keys)) == 3
    assert key(torch.float16) == keys[1]


BY_NAME = {
    "getattr": "return x * getattr(holder, name)",
    "globals": "return x * globals()['holder'].scale",
    "vars": "return x * vars(holder)['scale']",
    "eval": "return x * eval('holder.scale')",
    "environ": "return x * float(__import__('os').environ.get('SCALE', 1))",
    "getenv": "import os; return x * float(os.getenv('SCALE', 1))",
    "open": "return x * len(open(__file__).read())",
    "import_module": "import importlib; return x * importlib.import_module(name).scale",
    "nested": "return (lambda: x * getattr(holder, name))()",
}


@pytest.mark.parametrize("body", BY_NAME.values(), ids=BY_NAME)
def test_what_is_reached_by_name_never_matches(body, tmp_path, monkeypatch):
    source = f"""
        class Holder:
            scale = 2.0

        holder, name = Holder(), "scale"

        def helper(x):
            {body}

        def fn(x):
            return helper(x)
        """
    module = load(tmp_path, monkeypatch, source)
    assert fingerprint(module.fn, (X,)) != fingerprint(module.fn, (X,))
    assert fingerprint(lambda x: x.relu(), (X,)) == fingerprint(lambda x: x.relu(), (X,))
