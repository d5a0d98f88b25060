"""The report of a quantized build: in Python, from a shell, and against sizes that are measured."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import tvmcap
from tests.quantizing import build, data
from tvmcap.base.accuracy import AccuracyReport
from tvmcap.base.errors import LibraryError
from tvmcap.cli import main

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 96)

    def forward(self, x):
        return torch.relu(self.up(x))

def batches():
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(24, 64, generator=generator) for _ in range(4))

def broken():
    yield torch.randn(24, 64)
    raise ValueError("half way")

def forgotten():
    list(batches())
"""


class Block(nn.Module):
    """One layer whose weight is most of a library."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(1024, 512)

    def forward(self, x):
        return torch.tanh(self.up(x))


def test_sizes_before_are_those_of_an_unquantized_build(tmp_path) -> None:
    x = data(16, 1024, seed=0)
    plain, lib = build(Block(), x, tmp_path), build(Block(), x, tmp_path, quantize="int8")
    report = lib.accuracy
    exported = lib.export(tmp_path / "small.so")
    assert report.library_after == exported.stat().st_size
    assert report.library_before == pytest.approx(plain.path.stat().st_size, rel=0.03)
    assert report.library_after < 0.35 * report.library_before
    assert report.constants_before == 4 * (1024 * 512 + 512)
    columns = 4 * 3 * 512  # a scale, a correction and a bias each
    assert 0 <= report.constants_after - (1024 * 512 + columns) < 64  # and a few scalars
    score, before = (x.scoreboard(baselines=False) for x in (lib, plain))
    assert score.weight_bytes <= 0.27 * before.weight_bytes == 0.27 * report.constants_before
    assert f"{score.weight_bytes:,}" in str(score) and "activation traffic" in str(score)
    assert "library: " in lib.explain() and "library: " in lib.inspect("accuracy")
    page = lib.write_accuracy(tmp_path / "report.html").read_text()
    assert "up.weight" in page and "1 example input" in page
    with pytest.raises(LibraryError, match="not quantized"):
        plain.write_accuracy(tmp_path / "none.html")
    with pytest.raises(LibraryError, match="not quantized"):
        plain.inspect("accuracy")


def test_the_report_from_a_shell(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("TVMCAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TVMCAP_TUNE", "none")
    monkeypatch.setenv("TVMCAP_VERIFY", "0")
    program, page = tmp_path / "shell_program.py", tmp_path / "report.html"
    program.write_text(SOURCE)
    build = ["build", f"{program}:Net", "--input", "x:f32[B=16,64]", "--target", "llvm"]
    static = ["--quantize", '{"activations": "static", "method": "percentile", "percentile": 99}']
    calibration = ["--calibration", f"{program}:batches"]
    library = str(tmp_path / "net.so")
    done = [*build, *static, *calibration, "--accuracy", str(page), "-o", library]
    assert main(done) == 0
    told = capsys.readouterr().out
    assert "within the budget of 20 dB (1 input held out of calibration)" in told
    assert "up.weight" in told and "up.weight" in page.read_text()
    data = tmp_path / "report.json"
    assert main(["inspect", library, "--show", "accuracy", "--accuracy", str(data)]) == 0
    assert capsys.readouterr().out.strip() in told
    report = AccuracyReport.from_json(json.loads(data.read_text()))
    assert report == tvmcap.load(library).accuracy and report.layers[0].saturation > 0
    ranges = tvmcap.load(library).ranges.save(tmp_path / "ranges.json")
    again = tmp_path / "again.so"
    assert main([*build, *static, "--calibration", str(ranges), "-o", str(again)]) == 0
    assert tvmcap.load(again).ranges == tvmcap.load(library).ranges

    page.unlink()
    capsys.readouterr()
    build[3] = "x:f32[16,64]"
    missed = ["--quantize", '{"budget_db": 90}', "--accuracy", str(page)]
    assert main([*build, *missed]) == 1
    err = capsys.readouterr().err
    assert "OUTSIDE the budget of 90 dB" in err and "up.weight" in err and "keep=" in err
    assert "OUTSIDE the budget of 90 dB" in page.read_text()

    def full(*_) -> None:
        raise LibraryError("no space left")

    monkeypatch.setattr("tvmcap.view.accuracy.write", full)
    assert main([*build, *missed]) == 1
    assert "OUTSIDE the budget of 90 dB" in capsys.readouterr().err
    kept = tmp_path / "kept.so"
    assert main([*build, "--quantize", "int8", "--accuracy", str(page), "-o", str(kept)]) == 1
    assert "no space left" in capsys.readouterr().err and tvmcap.load(kept).accuracy.ok


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--accuracy", "r.html"], 2, "give --quantize, too"),
        (["--quantize", "int8", "--accuracy", "r.pdf"], 2, "expected the name of a .html"),
        (["--quantize", '{"schema": 1}'], 2, "did you mean 'scheme'"),
        (["--quantize", "{"], 2, "cannot read quantize from '{'"),
        (["--quantize", "int8", "--calibration", "nowhere.json"], 2, "cannot read ranges"),
        (["--quantize", "int8", "--calibration", "nowhere.py:f"], 2, "no such file"),
        (["--quantize", "int8", "--calibration", "{}:broken"], 1, "broken raised ValueError: half"),
        (["--quantize", "int8", "--calibration", "{}:forgotten"], 2, "forgotten returned None"),
        (["--quantize", "int8", "--accuracy", "no/r.html", "-o", "n.so"], 1, "no folder no"),
    ],
)
def test_options_of_a_shell_that_make_no_report(options, status, message, tmp_path, capsys) -> None:
    program = tmp_path / "refused_program.py"
    program.write_text(SOURCE)
    build = ["build", f"{program}:Net", "--input", "x:f32[B=16,64]", "--target", "llvm"]
    given = [x.replace("{}:", f"{program}:") for x in options]
    assert main([*build, *given]) == status
    err = " ".join(capsys.readouterr().err.split())
    assert message in err and "building" not in err
