"""Templates of the user: who is asked first, what is refused, what a build depends on."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tvmcap
from tests.kernel import fake_template
from tests.kernel.fake_template import FAKE
from tvmcap.base.errors import ConfigError
from tvmcap.kernel import measure, process, registry, spaces
from tvmcap.kernel.template import Template, source_hash


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def named(name: str) -> Template:
    return dataclasses.replace(FAKE, name=name)


def kernel() -> Any:
    mod = fake_template.module()
    return next(f for f in mod.functions.values() if "s_tir" in (f.attrs or {}))


def test_the_last_one_registered_comes_first() -> None:
    assert spaces.find(kernel(), fake_template.target())[0].name == "cpu_gemm"
    first, second, again = named("first"), named("second"), named("first")
    for template in (first, second):
        tvmcap.register_template(template)
    assert registry.registered() == (second, first)
    found, problem = spaces.find(kernel(), fake_template.target())
    assert found is second and problem.k == 32
    tvmcap.register_template(again)
    assert registry.registered()[0] is again and len(registry.registered()) == 2


def test_why_a_registered_template_does_not_serve_is_told() -> None:
    silent = dataclasses.replace(named("mine"), match=lambda *_: None, refuse=lambda *_: "too wide")
    tvmcap.register_template(silent)
    assert spaces.refusals(kernel(), fake_template.target()) == "no mine: too wide"


def test_what_can_be_no_template() -> None:
    with pytest.raises(ConfigError, match=r"expected a .*Template, got str"):
        tvmcap.register_template("cpu_gemm")
    with pytest.raises(ConfigError, match="'cpu_gemm' ships with tvmcap"):
        tvmcap.register_template(named("cpu_gemm"))
    assert registry.registered() == ()


def test_a_template_in_a_script_is_refused() -> None:
    script = (
        "import dataclasses, tvmcap\n"
        "from tests.kernel.fake_template import FAKE\n"
        "def lower(func, problem, knobs, target): return func\n"
        "tvmcap.register_template(dataclasses.replace(FAKE, lower=lower))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "move it to a module" in done.stderr, done.stderr[-2000:]


def test_a_build_depends_on_the_source_of_each() -> None:
    assert registry.identity() == []
    tvmcap.register_template(named("mine"))
    assert registry.identity() == [["mine", source_hash(FAKE)]]


def test_workers_find_the_modules_of_templates(tmp_path: Path) -> None:
    """Also where they were imported from a folder that is not on the path any more."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    text = "from tests.kernel.fake_template import *\ndef lower(*args): return None\n"
    text += "TEMPLATE = Template('mine', Knobs, match, space, default, lower, features, ())\n"
    (tmp_path / "mine" / "fake.py").write_text(text)
    sys.path.insert(0, str(tmp_path))
    try:
        module = importlib.import_module("mine.fake")
    finally:
        sys.path.remove(str(tmp_path))
    tvmcap.register_template(module.TEMPLATE)
    assert registry.folders() == [str(tmp_path.resolve())]
    path = process.environment(fake_template.target())["PYTHONPATH"]
    assert path.split(os.pathsep)[-1] == str(tmp_path.resolve())
    assert measure.template_ref(module.TEMPLATE) == "mine.fake:TEMPLATE"
