"""What the GEMM suite tunes, and what ships of its records."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import gemm_common as gemm
import tune_suite

from tvmcap.kernel.fingerprint import tvm_version
from tvmcap.kernel.records import FILE_NAME, Record, RecordStore
from tvmcap.kernel.stores import template_hashes


def test_a_problem_is_tuned_at_all_its_rows() -> None:
    assert set(tune_suite.problems(gemm.SUITE)[1024, 4096]) == {16, 128, 1000, 2048, 4096, 8192}


def record(us: float | None, bn: int, rows: int, template_hash: str) -> Record:
    error = None if us is not None else {"cause": "compile", "message": "x"}
    return Record(
        kind="template", workload={"k": 1}, workload_hash="w", sizes={"rows": rows},
        template="hopper_gemm", template_hash=template_hash, knobs={"bn": bn}, trace=None,
        target={"kind": "cuda"}, tvm=tvm_version(), median_us=us, p10_us=us, p90_us=us, samples=7,
        error=error, seed=0, date="d", features=[1.0],
    )  # fmt: skip


def test_what_ships_is_the_best_of_each_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = template_hashes()["hopper_gemm"]
    logs, to = RecordStore(tmp_path / "logs"), tmp_path / "shipped"
    logs.append([record(10.0 + bn, bn, rows, now) for bn in range(8) for rows in (1, 64)])
    logs.append([record(1.0, 100, 1, "old"), record(None, 101, 1, now), record(50.0, 0, 1, now)])
    there = [record(5.0, 200, 1, now), record(2.0, 201, 1, "old")]
    RecordStore(to).append(dataclasses.replace(r, features=None) for r in there)
    done = tune_suite.compact(tmp_path / "logs", to, most=5)
    written = RecordStore(to)
    kept = written.records
    assert len(kept) == done.kept == 10 and written.bad_lines == 0
    assert done.dropped == {"stale_template": 1, "surplus": 7}
    assert {r.template_hash for r in kept} == {now} and all(r.features is None for r in kept)
    for rows, fastest in ((1, [5.0, 11.0, 12.0]), (64, [10.0, 11.0, 12.0])):
        mine = [r for r in kept if r.sizes == {"rows": rows}]
        assert sorted(r.median_us for r in mine)[:3] == fastest
        assert len({r.candidate for r in mine}) == 5
    before = written.path.read_bytes()
    assert tune_suite.compact(tmp_path / "logs", to, most=5).kept == 10
    assert written.path.read_bytes() == before
    assert tune_suite.compact(tmp_path / "logs", to, most=20).kept == 17
    again = [r for r in RecordStore(to).records if r.knobs == {"bn": 0} and r.sizes["rows"] == 1]
    assert [r.median_us for r in again] == [50.0]  # of two timings the later counts
    monkeypatch.setattr(tune_suite, "MOST_BYTES", 100)
    with pytest.raises(SystemExit, match="smaller --most"):
        tune_suite.compact(tmp_path / "logs", to, most=20)


def test_compacting_what_ships_changes_nothing(tmp_path: Path) -> None:
    to, logs = tmp_path / "shipped", RecordStore(tmp_path / "logs")
    shutil.copytree(gemm.shipped(), to)
    before = (to / FILE_NAME).read_bytes()
    logs.append([])
    assert tune_suite.compact(logs.folder, to, most=200).dropped == {}
    assert (to / FILE_NAME).read_bytes() == before
