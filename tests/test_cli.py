"""The command line: verbs, JSON, exit statuses, clean errors."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tvmcap.base.config import FIELDS
from tvmcap.base.errors import InputError
from tvmcap.cli import _NO_OPTION, config_options, main, make_parser
from tvmcap.view import arrays

SOURCE = """
import torch

def block(x, w, b):
    return torch.relu(x @ w + b)

def other(x, w, b):
    return torch.relu(x @ w + b) * 1.001

def branches(x):
    return x if x.sum() > 0 else -x
"""
INPUTS = ["--input", "x:f32[B=6..64,16]", "--input", "w:f32[16,24]", "--input", "b:f32[24]"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a program and the library of it."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "cli_program.py").write_text(SOURCE)
    patch = pytest.MonkeyPatch()
    patch.setenv("TVMCAP_CACHE_DIR", str(folder / "cache"))
    patch.setenv("TVMCAP_LOG_DIR", str(folder / "logs"))
    command = ["build", f"{folder}/cli_program.py:block", *INPUTS, "--target", "llvm"]
    assert main([*command, "-o", str(folder / "block.so")]) == 0
    yield folder
    patch.undo()


def test_build_writes_a_library_and_says_what_it_is(place, capsys):
    command = ["build", f"{place}/cli_program.py:block", *INPUTS, "--target", "llvm", "--json"]
    assert main(command) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verified"] is True and data["signature"]["dims"][0]["max"] == 64
    assert (place / "block.so").stat().st_size > 1000


def test_run_reads_and_writes_arrays(place, capsys):
    rng = np.random.default_rng(0)
    shapes = {"x": (3, 16), "w": (16, 24), "b": (24,)}
    given = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    np.savez(place / "in.npz", **given)
    library, out = str(place / "block.so"), str(place / "out.npz")
    assert main(["run", library, "--inputs", str(place / "in.npz"), "--save", out]) == 0
    want = np.maximum(given["x"] @ given["w"] + given["b"], 0)
    assert np.allclose(np.load(out)["out0"], want, rtol=1e-5, atol=1e-5)
    assert "out0" in capsys.readouterr().out
    assert main(["run", library, "--sizes", "B=5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["shape"] == [5, 24]


def test_verify_passes_and_fails_by_exit_status(place, capsys):
    library = str(place / "block.so")
    assert main(["verify", library, f"{place}/cli_program.py:block"]) == 0
    assert "verified" in capsys.readouterr().out
    assert main(["verify", library, f"{place}/cli_program.py:other", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and report["max_abs"] > 0
    against = ["--against", f"{place}/cli_program.py:block", "--level", "full", "--sizes", "B=7"]
    assert main(["verify", library, *against]) == 0
    capsys.readouterr()
    assert main(["verify", library]) == 2
    assert "--against" in capsys.readouterr().err


def test_bench_of_a_program_from_the_cache_and_of_a_library(place, capsys):
    assert (
        main(["bench", f"{place}/cli_program.py:block", *INPUTS, "--target", "llvm", "--json"]) == 0
    )
    data = json.loads(capsys.readouterr().out)
    assert data["kernels"] == data["kernels_traced"] == 1 and data["eager_kernels"] == 3
    assert data["eager_us"]["median"] > 0
    assert main(["bench", str(place / "block.so"), "--no-baselines", "--sizes", "B=9"]) == 0
    assert "Scoreboard at B=9" in capsys.readouterr().out


def test_inspect_report_cache_and_doctor(place, capsys):
    assert main(["inspect", str(place / "block.so")]) == 0
    assert "x: float32[B, 16]" in capsys.readouterr().out
    assert main(["inspect", str(place / "block.so"), "--show", "kernels"]) == 0
    assert capsys.readouterr().out.startswith("kernels and what schedules them")
    none = place / "none"
    none.mkdir()
    (none / "records.jsonl").write_text("garbage\n")
    assert main(["report", str(none), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["best"] == [] and data["status"] == {"bad_lines": 1}
    assert main(["report", str(none), "-o", str(none / "r.html")]) == 1
    assert "which hold 1 bad_lines: tvmcap tune writes records" in capsys.readouterr().err
    assert not (none / "r.html").exists()
    assert main(["cache", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"] >= 1
    empty = str(place / "empty")
    assert main(["cache", "clear", "--cache-dir", empty]) == 0
    assert "removed 0" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert {f["name"] for f in json.loads(capsys.readouterr().out)} >= {"tvm", "gpu", "nvcc"}


def test_inspect_describes_a_library_of_another_machine(hopper_block, capsys):
    assert main(["inspect", str(hopper_block.path)]) == 0
    text = capsys.readouterr().out
    assert "arch sm_90a" in text and "kernels    1 a call" in text


@pytest.mark.parametrize(
    "command, status, message",
    [
        (["build", "{p}/cli_program.py:nope"], 2, "it has block"),
        (["build", "{p}/cli_program.py:block", *INPUTS, "--disable", "fusee"], 2, "fusee"),
        (["build", "{p}/cli_program.py:block", *INPUTS, "--tune", "lots"], 2, "tune"),
        (["build", "{p}/cli_program.py:branches", "--input", "f32[4]"], 1, "branches on"),
        (["run", "{p}/none.so"], 1, "no such file"),
        (["run", "{p}/cli_program.py"], 1, "not a tvmcap library"),
        (["run", "{p}/block.so", "--sizes", "B=65"], 1, "at most 64"),
        (["run", "{p}/block.so", "--sizes", "Q=1"], 2, "'Q'"),
        (["bench", "{p}/block.so", "--no-baselines", "--sizes", "Q=1"], 2, "are: B"),
        (["bench", "{p}/cli_program.py:block", *INPUTS, "--walk", "--sizes", "Q=1"], 2, "are: B"),
        (
            ["verify", "{p}/block.so", "{p}/cli_program.py:block", "--sizes", "Q=1"],
            2,
            "are: B",
        ),
        (["run", "{p}/block.so", "--save", "{p}/nowhere/o.npz"], 1, "o.npz: cannot be written"),
        (["run", "{p}/block.so", "--save", "{p}/nowhere/o.safetensors"], 1, "cannot be written"),
        (["run", "{p}/block.so", "--save", "{p}/o.txt"], 2, "expected .npz"),
        (["run", "{p}/block.so", "--sample", "{p}/o.npy"], 2, "expected .npz or .safetensors"),
        (["package", "{p}/none.so", "-o", "{p}/dist"], 1, "no such file"),
        (["package", "{p}/block.so", "-o", "{p}"], 2, "new or empty folder"),
        (["package", "{p}/block.so", "-o", "{p}/dist", "--sample", "{p}/no.npz"], 2, "no such"),
        (["serve", "{p}/none.so", "--port", "0"], 1, "no such file"),
        (["serve", "{p}/block.so", "--port", "70000"], 2, "expected 0 to 65535"),
        (["serve", "{p}/block.so", "--name", "a/b"], 2, "expected letters"),
        (["serve", "{p}/block.so", "--port", "0", "--max-delay-ms", "-1"], 2, "at least 0"),
        (["serve", "{p}/block.so", "--port", "0"], 2, "same dynamic dimension in front"),
        (["run", "{p}/" + "x" * 300 + ".so"], 1, "too long"),
        (["build", "{p}/cli_program.py:block", *INPUTS, "--seed", "x"], 2, "seed"),
        (["build", "{p}/cli_program.py:block", *INPUTS, "--target", "llvm:zzz"], 2, "'zzz'"),
        (["report", "{p}/nowhere"], 2, "no such folder"),
        (["report", "{p}"], 2, "no store of records"),
        (["report", "{p}", "-o", "{p}/r.pdf"], 2, ".html or .png"),
        (["report", "{p}", "-o", "{p}/nowhere/r.html"], 2, "no folder"),
        (["report", "{p}", "-o", "{p}"], 2, ".html or .png"),
        (["cache", "merge", "{p}"], 2, "--into"),
        (["cache", "merge", "{p}", "--into", "{p}/other"], 2, "no store of records"),
        (["cache", "clear", "{p}"], 2, "--cache-dir"),
        (["cache", "status", "--dry-run"], 2, "of cache prune"),
    ],
)
def test_errors_are_one_clean_message(place, capsys, command, status, message):
    assert main([c.format(p=place) for c in command]) == status
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


BAD_FILES = {
    "junk.npz": lambda path: path.write_bytes(b"nonsense"),
    "array.npz": lambda path: np.save(path.open("wb"), np.zeros(3)),
    "obj.npz": lambda path: np.savez(path, **{n: np.array([None]) for n in "xwb"}),
    "text.npz": lambda path: np.savez(path, **{n: np.array(["a"]) for n in "xwb"}),
    "junk.npy": lambda path: path.write_bytes(b""),
    "obj.npy": lambda path: np.save(path, np.array([None, 3]), allow_pickle=True),
    "zip.npy": lambda path: np.savez(path.open("wb"), x=np.zeros(3)),
    "junk.safetensors": lambda path: path.write_bytes(b"nonsense"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_of_inputs_that_cannot_be_read(place, tmp_path, capsys, name):
    path = tmp_path / name
    BAD_FILES[name](path)
    names = ("x",) if name.endswith(".npy") else ("x", "w", "b")
    signature = SimpleNamespace(inputs=[SimpleNamespace(name=n) for n in names])
    with pytest.raises(InputError, match=rf"{name}.*expected"):
        arrays.read(str(path), signature)
    if len(names) == 3:
        assert main(["run", str(place / "block.so"), "--inputs", str(path)]) == 1
        err = capsys.readouterr().err
        assert name in err and "Traceback" not in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "source, words",
    [
        ("def f(x:\n    return x\n", "SyntaxError"),
        ("x = 1\nraise ValueError('two\\nlines')\n", "ValueError: two (.*line 2)"),
        ("import sys\nsys.exit(0)\n", "SystemExit"),
        ("def f():\n    return 1 / 0\n", "ZeroDivisionError.*line 2"),
        ("def f(x):\n    raise KeyError('k')\n", "KeyError"),
    ],
)
def test_a_program_that_raises(tmp_path, capsys, source, words):
    path = tmp_path / "raising_program.py"
    path.write_text(source)
    command = ["build", f"{path}:f", "--input", "x:f32[4]", "--target", "llvm"]
    assert main([*command, "--cache-dir", str(tmp_path / "cache")]) == 1
    err = capsys.readouterr().err
    assert re.search(words, err) and "Traceback" not in err
    assert ("raising_program" in sys.modules) == ("def f(x)" in source or "def f()" in source)
    sys.modules.pop("raising_program", None)


def test_an_unexpected_error_is_one_line_without_debug(place, capsys, monkeypatch):
    def fail(args):
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("tvmcap.verbs.cache", fail)
    assert main(["cache", "status"]) == 1
    err = capsys.readouterr().err
    assert "RuntimeError: first" in err and "second" not in err and "--debug" in err
    with pytest.raises(RuntimeError):
        main(["cache", "status", "--debug"])


def test_a_package_that_is_missing_is_named(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.logging", None)
    assert main(["run", str(place / "block.so")]) == 1
    assert "needs the Python package rich" in capsys.readouterr().err


def test_usage_errors_exit_with_2(capsys):
    wrong = [["tune", "f.py:f", "--trials", "0"], ["run", "f.so", "--seed", "-1"]]
    for command in ([], ["frobnicate"], ["cache"], ["run"], *wrong):
        with pytest.raises(SystemExit) as e:
            main(command)
        assert e.value.code == 2


def test_every_field_of_config_with_an_effect_is_an_option():
    parser = make_parser()
    text = {"constants": "w,b", "disable": "fuse", "tune": "32", "seed": "3", "workers": "2"}
    text |= {"rpc": "here:9190"}
    flags = []
    switches = {name for name, field in FIELDS.items() if field.type == "bool"} - set(_NO_OPTION)
    flags += ["--" + name.replace("_", "-") for name in sorted(switches - {"verify"})]
    for name in sorted(set(FIELDS) - set(_NO_OPTION) - switches):
        number = "0.5" if "float" in str(FIELDS[name].type) else "x"
        flags += ["--" + name.replace("_", "-"), text.get(name, number)]
    options = config_options(parser.parse_args(["build", "f.py:f", "--no-verify", *flags]))
    assert set(options) == set(FIELDS) - set(_NO_OPTION)
    assert options["constants"] == ("w", "b") and options["tune"] == 32
    assert {name: options[name] for name in switches} == {s: s != "verify" for s in switches}


def test_help_starts_without_torch_and_tvm():
    code = (
        "import sys; from tvmcap.cli import make_parser; make_parser().format_help();"
        "print([m for m in ('torch', 'tvm', 'tvm_ffi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
