"""The GEMM benchmarks as far as a machine without a GPU goes: settings, flow, tables."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import gemm_common as gemm
import gemm_ladder
import gemm_report
import gemm_suite
import gemm_tables
import gemm_timing
import gemm_traffic

from tvmcap.base import codegen


@dataclasses.dataclass(frozen=True)
class Knobs:
    """A stand-in for a template's knobs."""

    bn: int = 128
    stages: int = 6
    late: bool = False


def test_the_suite_has_its_shapes() -> None:
    assert len(gemm.SUITE) == len(set(gemm.SUITE)) == 29
    assert gemm.parse_shapes("2048x1024x4096, 1x8x16") == (
        gemm.Shape(2048, 1024, 4096),
        gemm.Shape(1, 8, 16),
    )
    for wrong in ("12x3", "axbxc", "0x1x2", ""):
        with pytest.raises(SystemExit, match="MxKxN"):
            gemm.parse_shapes(wrong)


def test_settings_expand_and_refuse(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(
        json.dumps(
            [
                {"rung": "a", "knobs": {"bn": [64, 128], "late": [False, True]}, "max_m": 64},
                {"rung": "a", "knobs": {"bn": 64}, "max_m": 64},
                {"rung": "b", "knobs": {"wide": 1}},
            ]
        )
    )
    settings, refused = gemm.read_settings(path, Knobs)
    assert [(s.knobs.bn, s.knobs.late) for s in settings] == [
        (64, False),
        (64, True),
        (128, False),
        (128, True),
    ]
    assert {s.max_m for s in settings} == {64} and len(refused) == 1 and "wide" in refused[0]
    assert gemm.changed(Knobs(64)) == {"bn": 64} and gemm.changed(Knobs()) == {}
    assert gemm.read_settings(None, Knobs) == ([gemm.Setting("default", Knobs())], [])


def test_the_recorded_rungs_are_settings_of_todays_template() -> None:
    from tvmcap.schedules.hopper_gemm import Knobs

    settings, refused = gemm.read_settings(gemm_ladder.HERE / "rungs.json", Knobs)
    assert not refused and len({s.rung for s in settings}) > 5


def test_every_recorded_rung_fits_the_shapes_it_is_for() -> None:
    from tvmcap.schedules import hopper_gemm

    settings, _ = gemm.read_settings(gemm_ladder.HERE / "rungs.json", hopper_gemm.Knobs)
    unfit, shapes = set(settings), (gemm.Shape(m, 4096, 4096) for m in (8, 16, 64, 256, 2048))
    for shape in shapes:
        product = hopper_gemm.match(gemm.block(shape.k, shape.n), gemm.target())
        ranged = (s for s in settings if s.min_m <= shape.m <= s.max_m)
        unfit -= {s for s in ranged if hopper_gemm.fits(product, s.knobs)}
    assert not unfit, [(s.rung, gemm.changed(s.knobs)) for s in unfit]


@pytest.mark.parametrize("name", list(gemm_timing.baselines()))
def test_a_wrong_result_is_seen(name: str) -> None:
    inputs = gemm_timing.gemm_inputs(33, 64, 40, seed=3, device="cpu")
    out = gemm_timing.baselines()[name](inputs.sets[0])
    assert inputs.error(out) <= gemm_timing.TOLERANCE
    wrong = out.clone()
    wrong[32, 39] += 0.2 * inputs.scale
    assert inputs.error(wrong) > gemm_timing.TOLERANCE
    inputs.poison()
    assert inputs.error(inputs.sets[-1]["out"]) == float("inf")
    assert len(inputs.sets) == 64 and inputs.calls % 64 == 0
    assert inputs.read_bytes == 2 * (33 * 64 + 40 * 64 + 40)


RUNNER = """
import json, sys, time
opened = 0
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "open":
        opened += 1
        reply = {"errors": {}, "refused": {}, "sets": 2}
    elif request["op"] == "baselines":
        reply = {"us": {"cublaslt_epilogue_nk": [30.0, 32.0, 31.0], "linear_gelu": [40.0]}}
    else:
        data = open(request["path"], "rb").read()
        assert b"ELF" in data[4:] and b"__global__" not in data, "a binary and no source"
        if request["seconds"] == 1.0:
            time.sleep(60)
        reply = {"us": [20.0, 21.0, 22.0], "error_size": 0.001}
    print(json.dumps(reply), flush=True)
"""


def ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time_s: float) -> Any:
    """Run the ladder on one small shape with a runner that needs no GPU."""
    from tvmcap.schedules.hopper_gemm import Knobs

    script = tmp_path / "runner.py"
    script.write_text(RUNNER)
    original = gemm_ladder.Ladder.worker

    def worker(self: Any, command: tuple[str, ...]) -> Any:
        runs = command[-1].endswith("gemm_runner.py")
        return original(self, (sys.executable, str(script)) if runs else command)

    monkeypatch.setattr(gemm_ladder.Ladder, "worker", worker)
    monkeypatch.setattr(gemm_ladder, "RUN_TIMEOUT_S", 0.5)
    options = gemm_ladder.parse(
        ["--json", str(tmp_path / "out.json"), "--workers", "1", "--time-s", str(time_s)]
    )
    made = gemm_ladder.Ladder(options, [gemm.Setting("first", Knobs())])
    plan = {shape: made.wanted(shape) for shape in (gemm.Shape(16, 128, 256),)}
    made.build(plan)
    made.run(plan)
    return made


@pytest.mark.skipif(codegen.find_nvcc() is None, reason="no nvcc")
def test_the_ladder_builds_measures_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ladder(tmp_path, monkeypatch, 0.02)
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["rung"] == "first" and row["us"] == 21.0 and row["ratio_to_cublaslt"] == 1.4762
    assert len(row["baselines_us"]["cublaslt_epilogue_nk"]["samples"]) == 9
    assert "1 of 1 kernels" in capsys.readouterr().out
    table = gemm_report.rung_table(made.shapes, made.candidates)
    assert "21.0 1.476x" in table and "geometric mean" in table
    head, body = gemm_tables.ladder_table([row])
    assert head[1] == "16 x 128 x 256" and body == [["first", "1.48x", "1.48x"]]


@pytest.mark.skipif(codegen.find_nvcc() is None, reason="no nvcc")
def test_a_hang_costs_its_own_time_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ladder(tmp_path, monkeypatch, 1.0)
    (candidate,) = json.loads((tmp_path / "out.json").read_text())["candidates"]
    assert candidate["cause"] == "hang" and made.hangs == {"first": 1}
    assert "first: 1 hang" in gemm_report.rung_table(made.shapes, made.candidates)


@pytest.mark.gpu
def test_the_ladder_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "ladder.json"
    arguments = ["--json", str(out), "--shapes", "300x1024x512", "--workers", "1"]
    script = gemm_ladder.HERE / "gemm_ladder.py"
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads(out.read_text())["rows"]
    assert row["error"] <= gemm_timing.TOLERANCE and 2 < row["us"] < 100
    assert len(row["baselines_us"]) == 3 and "300x1024x512" in done.stdout


def suite_row(m: int, k: int, n: int, ratio: float, **more: Any) -> dict[str, Any]:
    base = {"median": 10.0 * ratio, "p10": 9.0 * ratio, "p90": 11.0 * ratio}
    row = {"kind": "gemm", "M": m, "K": k, "N": n, "speedup_vs_best": ratio, "complete": True}
    row |= {"ours_us": {"median": 10.0, "p10": 9.0, "p90": 11.0}, "tflops": 500.0}
    row |= {"read_share": 0.6, "ratio_to_cublaslt": ratio}
    return {**row, "baselines_us": {"cublaslt_epilogue": base}, **more}


def test_the_suite_comes_to_figures_and_tables() -> None:
    rows = [suite_row(2048, 1024, 4096, 2.0), suite_row(16, 1024, 4096, 0.5)]
    rows.append({"kind": "gemm", "M": 1, "K": 8, "N": 8, "failed": "E: a | b", "complete": False})
    fresh = {"kind": "never tuned", "M": 77, "K": 8, "N": 8, "ratio_to_tuned": 0.95}
    rows.append({**fresh, "ours_us": rows[0]["ours_us"], "tuned_us": rows[0]["ours_us"]})
    found = gemm_tables.summary(rows)
    assert found["mean_vs_best"] == 1.0 and found["mean_vs_best_from_256_rows"] == 2.0
    assert found["least_vs_best"] == 0.5 and found["failed"] == 1
    assert found["least_vs_cublaslt_of_8_mib_weights"] == 0.5
    assert found["least_share_of_copy_bandwidth"] is None
    shown = dict(gemm_tables.summary_table(rows)[1])
    assert shown["worst shape over its best baseline"] == "0.50x"
    head, body = gemm_tables.suite_table(lambda t: "-" if t is None else str(t["median"]))(rows)
    assert [len(line) for line in body] == [len(head)] * 3
    assert "failed: E: a / b" in body[2] and body[1][-1] == "60%" and body[0][-1] == ""
    never = gemm_tables.never_tuned_table(lambda t: str(t["median"]))(rows)[1]
    assert never == [["77", "8", "8", "10.0", "10.0", "0.95x"]]


def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "suite.json"
    measured: list[str] = []

    def suite(*arguments: str) -> gemm_suite.Suite:
        monkeypatch.setattr(sys, "argv", ["x", "run", ".", "--json", str(out), *arguments])
        return gemm_suite.Suite(gemm_suite.parse())

    def add(made: gemm_suite.Suite, m: int, complete: bool = True) -> None:
        def measure() -> dict[str, Any]:
            measured.append(str(m))
            row = suite_row(m, 8, 8, 1.0, complete=complete)
            return {k: v for k, v in row.items() if k not in ("kind", "M", "K", "N")}

        made.add({"kind": "gemm", "M": m, "K": 8, "N": 8}, measure)

    first = suite()
    add(first, 1)
    add(first, 2, complete=False)
    again = suite()
    for m in (1, 2, 3):
        add(again, m)
    add(suite("--no-compile"), 2)
    add(suite("--again"), 1)
    add(suite("--budget", "1"), 4)
    assert measured == ["1", "2", "2", "3", "1"] and "no time left" in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert sorted(r["M"] for r in data["rows"]) == [1, 2, 3]
    assert data["summary"]["with_every_baseline"] == 3
    data["rows"][0]["source"] = "old"
    out.write_text(json.dumps(data))
    add(suite(), data["rows"][0]["M"])
    assert len(measured) == 6


def test_profiler_output_is_summed_over_kernels() -> None:
    text = "\n".join(
        [
            "==PROF== Connected",
            '"ID","Metric Name","Metric Unit","Metric Value"',
            '"0","dram__bytes_read.sum","Mbyte","12.5"',
            '"0","dram__bytes_write.sum","byte","1,024"',
            '"1","dram__bytes_read.sum","Kbyte","500"',
        ]
    )
    found = gemm_traffic.read_metrics(text)
    assert found["dram__bytes_read.sum"] == 13e6 and found["dram__bytes_write.sum"] == 1024
    assert found["kernels"] == 2
    with pytest.raises(RuntimeError, match="no permission"):
        gemm_traffic.read_metrics("==ERROR== no permission")


def test_parse_leaves_the_command_line_alone() -> None:
    assert isinstance(gemm_ladder.parse([]), argparse.Namespace)
    assert gemm_ladder.parse([]).layout == "nk"
