"""Tables of the documents come from result files, and old ones are called stale."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tvmcap.versions import source_hash

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
render = importlib.util.module_from_spec(spec)
spec.loader.exec_module(render)
plots = render.plots

TEXT = "before\n<!-- table:walk -->\nold\n<!-- end -->\nafter\n"


def latency(median):
    return {"median": median, "p10": 0.9 * median, "p90": 1.1 * median, "samples": [median]}


def walk_row(step, us, **more):
    return {
        "step": step,
        "B": 16,
        "kernels": 1,
        "hbm_bytes": 3 << 20,
        "activation_traffic": 1.25,
        "peak_bytes_planned": 1 << 20,
        "eager_kernels": 3,
        "eager_activation_traffic": 5.25,
        "ours_us": latency(us),
        "baselines_us": {"eager": latency(50.0), "torch.compile": latency(40.0)},
        **more,
    }


def gpu_row(batch, speedup, **more):
    row = {"case": "block", "dtype": "float16", "frozen": True, "B": batch, "right": True}
    row |= {"kernels": 1, "error": 1e-3, "eager_error": 2e-3, "speedup_vs_best": speedup}
    row |= {"ours_us": latency(10.0), "baselines_us": {"eager": latency(10.0 * speedup)}}
    return {**row, **more}


def results(folder, source="now", **files):
    meta = {
        "card": "A card",
        "cpu": "A CPU",
        "threads": 2,
        "driver": "1.2",
        "versions": {"torch": "2.13", "tvm": "0.27"},
        "date": "2026-11-29T18:48:18+00:00",
        "source": source,
        "command": "walk.py --json x",
    }
    for name, rows in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"meta": meta, "rows": rows}))
    return folder


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_holds_the_figures_and_where_they_are_from(tmp_path):
    folder = results(tmp_path, walk=[walk_row("no fuse", 100.0), walk_row("all", 25.0)])
    text = render.fill(TEXT, folder, lambda _: "now")
    assert text.startswith("before\n<!-- table:walk -->\n") and text.endswith(
        "<!-- end -->\nafter\n"
    )
    for part in ("A card, driver 1.2", "torch 2.13", "2026-11-29", "walk.py --json x"):
        assert part in text
    assert "old" not in text and "tale" not in text
    head, _, eager, unfused, every = (cells(x) for x in text.splitlines() if x.startswith("|"))
    assert eager[:2] == ["eager", "3"] and eager[head.index("activation traffic")] == "5.25x"
    assert every[head.index("HBM bytes")] == "3.0 MiB"
    assert every[head.index("us a call")] == "25.0 (22.5 to 27.5)"
    assert (unfused[-1], every[-1]) == ("0.50x", "2.00x")
    assert render.fill(text, folder, lambda _: "now") == text, "rendering twice changes nothing"


def test_old_rows_are_marked(tmp_path):
    folder = results(tmp_path, walk=[walk_row("all", 25.0)])
    assert "**Stale: the source has changed since.**" in render.fill(
        TEXT, folder, lambda _: "later"
    )
    rows = [gpu_row(1, 1.5), gpu_row(7, 0.5, source="later")]
    folder = results(tmp_path, gpu_blocks=rows)
    lines = render.table("gpu_blocks_all", folder, lambda _: "later").splitlines()
    assert [cells(line)[-1] for line in lines[-2:]] == ["stale", ""]
    assert "partly stale" in render.table("gpu_blocks", folder, lambda _: "later")


def test_a_summary_hides_neither_failures_nor_wrong_results(tmp_path):
    rows = [gpu_row(1, 1.5), gpu_row(7, 0.5), gpu_row(128, 0.75, right=False)]
    rows.append({"case": "block", "dtype": "float16", "frozen": True, "B": 9, "failed": "E: a | b"})
    folder = results(tmp_path, gpu_blocks=rows)
    summary = cells(render.table("gpu_blocks", folder, lambda _: "now").splitlines()[-1])
    want = ["block, weights frozen", "1, 7, 128, 9", "1", "2 of 4", "0.50x to 1.50x, 1 failed"]
    assert summary == want
    lines = [
        cells(x) for x in render.table("gpu_blocks_all", folder, lambda _: "now").splitlines()[-4:]
    ]
    assert [line[-1] for line in lines] == ["yes", "yes", "**no**", "E: a / b"]
    assert len({len(line) for line in lines}) == 1


def test_cpu_block_and_overheads(tmp_path):
    row = {"case": "block, w and b frozen", "M": 16, "ours_us": latency(100.0)}
    row["baselines_us"] = {"eager": latency(150.0), "untuned": latency(300.0)}
    figure = {"figure": "import_s", "unit": "s", **latency(0.25)}
    folder = results(tmp_path, cpu_block=[row], overheads=[figure])
    line = cells(render.table("cpu_block", folder, lambda _: "now").splitlines()[-1])
    assert line[:2] == ["block, w and b frozen", "16"] and line[-3:] == ["-", "1.50x", "-"]
    assert "| import_s | 0.25 s | 0.225 to 0.275 |" in render.table(
        "overheads", folder, lambda _: "now"
    )


def test_host_times_and_counts_of_the_runtime(tmp_path):
    call = {"figure": "call, replay, out=", "unit": "us", **latency(4.0), "p99": 5.0}
    count = {"figure": "captures over 9 random sizes", "unit": "", "median": 7}
    folder = results(tmp_path, runtime_host=[{**call, "p99_over_p50": 1.25}, count])
    *_, head, _, line = render.table("runtime_host", folder, lambda _: "now").splitlines()
    assert cells(head)[-1] == "99th over median"
    assert cells(line) == ["replay, out=", "4.00", "3.60 to 4.40", "5.00", "1.25"]
    line = render.table("runtime_counts", folder, lambda _: "now").splitlines()[-1]
    assert cells(line) == ["captures over 9 random sizes", "7", ""]
    in_windows = {**call, "p99_over_p50": 1.25}
    in_windows["p99_over_p50_of_windows"] = [1.5, 1.25, 2.0, 1.75]
    in_windows["reference_of_windows"] = [1.1, 1.0, 1.2, 1.3]
    folder = results(tmp_path, runtime_host=[in_windows, {**call, "p99_over_p50": 1.5}, count])
    lines = render.table("runtime_host", folder, lambda _: "now").splitlines()
    head, _, *body = (cells(line) for line in lines if line.startswith("|"))
    assert head[-2:] == ["in 4 windows: least, median, most", "plain Python in them"]
    whole, other = (line[-3:] for line in body)
    assert whole == ["1.25", "1.25, 1.62, 2.00", "1.00, 1.15, 1.30"]
    assert other == ["1.50", "", ""]


def test_a_missing_file_is_a_sentence_and_an_unknown_table_an_error(tmp_path):
    assert "Not measured yet: `benchmarks/walk.py`" in render.fill(TEXT, tmp_path, lambda _: "now")
    with pytest.raises(ValueError, match="no table 'nope'"):
        render.fill(TEXT.replace("walk", "nope"), tmp_path, "now")


def test_check_fails_until_rendered(tmp_path):
    results(tmp_path, source_hash(), walk=[walk_row("all", 25.0)])
    document = tmp_path / "doc.md"
    document.write_text(TEXT)
    script = ROOT / "benchmarks" / "render.py"
    command = [sys.executable, str(script), "--results", str(tmp_path), str(document)]

    def run(*options):
        return subprocess.run([*command, *options], capture_output=True, text=True, check=False)

    first = run("--check")
    assert first.returncode == 1 and "out of date" in first.stdout
    assert document.read_text() == TEXT
    assert run().returncode == 0 and "25.0" in document.read_text()
    assert run("--check").returncode == 0


def test_the_documents_name_tables_that_exist():
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = [m[1] for d in documents for m in render.MARKED.findall(d.read_text())]
    assert named and set(named) <= set(render.TABLES)


def budget_row(budget, **more):
    bytes_of = {"saved_bytes": 1 << 20, "eager_saved_bytes": 2 << 20, "peak_bytes_planned": 3 << 20}
    return {"kind": "budget", "case": "8 layers", "memory_budget": budget, **bytes_of, **more}


def test_a_figure_is_out_of_date_when_its_rows_change(tmp_path):
    pytest.importorskip("matplotlib")
    docs = tmp_path / "docs"
    docs.mkdir()
    assert plots.outdated(docs, tmp_path) == [], "nothing was measured"
    results(tmp_path, training_memory=[budget_row(1.0), budget_row(0.9)])
    assert plots.outdated(docs, tmp_path) == ["training_memory.svg"]
    plots.draw("training_memory.svg", docs, tmp_path)
    assert plots.outdated(docs, tmp_path) == []
    text = (docs / "training_memory.svg").read_text()
    assert "peak, planned" in text and "measured" not in text
    measured = budget_row(1.0, peak_bytes=4 << 20, eager_peak_bytes=5 << 20)
    results(tmp_path, training=[{"kind": "layer"}, measured, {"kind": "budget", "failed": "x"}])
    assert plots.outdated(docs, tmp_path) == ["training_memory.svg"]
    plots.draw("training_memory.svg", docs, tmp_path)
    assert "peak, measured" in (docs / "training_memory.svg").read_text()


def test_the_figures_of_the_documents_are_up_to_date():
    assert plots.outdated(ROOT / "docs", ROOT / "benchmarks" / "results") == []
