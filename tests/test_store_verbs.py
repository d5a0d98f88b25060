"""The command line over stores of records: report, merge, prune."""

import dataclasses
import json
import re

from tests.kernel.model_cases import SHAPES, records
from tvmcap.cli import main
from tvmcap.kernel.records import RecordStore


def test_stores_are_reported_merged_and_pruned(tmp_path, capsys):
    made = records(SHAPES[:2], (512,), 16)
    old = [dataclasses.replace(r, tvm="0.1") for r in made[:3]]
    one, into = tmp_path / "one", tmp_path / "into"
    RecordStore(one).append([*made, *old])
    with (one / "records.jsonl").open("a") as file:
        file.write("garbage\n")
    outputs = [str(tmp_path / "r.html"), str(tmp_path / "r.png")]
    assert main(["report", str(one), "-o", outputs[0], "-o", outputs[1], "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["status"]["ok"] == 32 and len(data["best"]) == len(data["report"]["tasks"]) == 2
    assert "<svg" in (tmp_path / "r.html").read_text()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(one), "-o", "/proc/r.html"]) == 2
    assert "/proc/r.html: cannot be written" in capsys.readouterr().err
    assert main(["cache", "merge", str(one), "--into", str(into)]) == 0
    assert "35 records added, 0 were there; 1 bad lines stay" in capsys.readouterr().out
    cache = ["--cache-dir", str(tmp_path / "libraries")]
    assert main(["cache", "status", str(one), str(into), "--json", *cache]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["entries"] == 0
    counted = [(s["records"], s["bad_lines"], len(s["held"])) for s in data["stores"]]
    assert counted == [(35, 1, 2), (35, 0, 2)]
    prune = ["cache", "prune", str(one), "--best", "2", "--sample", "4"]
    assert main([*prune, "--dry-run", *cache]) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "would drop 23 records (3 other_tvm, 20 surplus), 12 kept" in said
    assert "23 of them are in no other store known here" in said and "no records; they stay" in said
    assert len(RecordStore(one).records) == 35
    assert main([*prune, "--log-dir", str(into), "--json", *cache]) == 0
    (done,) = json.loads(capsys.readouterr().out)
    assert (done["kept"], done["last_copies"], done["bad_lines"]) == (12, 0, 1)
    assert len(RecordStore(one).records) == 12 and len(RecordStore(into).records) == 35


def test_prune_leaves_what_ships_alone(tmp_path, monkeypatch, capsys):
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    old = [dataclasses.replace(r, tvm="0.1") for r in records(SHAPES[:1], (512,), 2)]
    for folder in (own, shipped / "cuda"):
        RecordStore(folder).append(old)
    monkeypatch.setattr("tvmcap.kernel.stores.SHIPPED", shipped)
    assert main(["cache", "prune", "--log-dir", str(own), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert [(d["folder"], d["kept"], d["last_copies"]) for d in done] == [(str(own), 0, 0)]
    assert len(RecordStore(shipped / "cuda").records) == 2
