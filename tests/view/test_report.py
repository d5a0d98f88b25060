"""Tables hold the figures; inspect and explain say what a library is."""

import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.verify.fakes import signature
from tvmcap.base.errors import ConfigError, LibraryError
from tvmcap.base.manifest import Manifest
from tvmcap.base.numerics import Comparison
from tvmcap.base.score import Latency, Score
from tvmcap.doctor import Finding
from tvmcap.kernel.results import by_numbers
from tvmcap.verify.result import Check, VerifyReport
from tvmcap.view import report
from tvmcap.view.explain import explain, tuning_notice
from tvmcap.view.inspect import inspect, one_line

COVERAGE = (
    {
        "task": "fused_matmul",
        "by": "template:cpu_gemm",
        "calls": 2,
        "tunable": True,
        "records": {"rows=16": "12.5 us"},
        "ranges": {"<=45": "mr=4", "any": "mr=6"},
        "reason": "",
        "tuned": True,
    },
    {"task": "softmax", "by": "rule:cpu", "calls": 1, "tunable": True, "reason": "no record"},
    {"task": "add", "by": "rule:cpu", "calls": 1, "tunable": False, "reason": "too small to tune"},
)


@pytest.fixture
def library():
    sig = signature({"x": ("float32", ("B", 4))}, [("float32", ("B", 8))], [("B", 1, 64)])
    manifest = Manifest(
        versions={"tvm": "0.27.0.post1", "torch": None},
        target={"kind": "llvm", "mcpu": "znver4", "features": ["avx2"]},
        signature=sig,
        coverage=COVERAGE,
        frozen=("fc.weight",),
        kernels_per_call=3,
        key="abc123",
    )
    return SimpleNamespace(
        manifest=manifest,
        passes=[("capture", 0.5), ("fuse", 0.25)],
        module=None,
        accuracy=None,
        executor=SimpleNamespace(copies=4),
        from_cache=False,
        foreign="",
        config=None,
    )


def test_inspect_shows_manifest_passes_and_kernels(library):
    text = inspect(library)
    for part in ("llvm", "znver4", "x: float32[B, 4]", "from 1 to 64", "fc.weight", "abc123"):
        assert part in text
    assert "750.0 ms" in text and "softmax: rule:cpu (no record)" in text
    assert "avx2" not in text and "avx2" in inspect(library, "json")


def test_a_library_is_one_line_for_whoever_prints_it(library):
    line = one_line("net.so", library.manifest)
    assert line.startswith("<tvmcap library net.so for llvm: x: float32[B, 4]") and "\n" not in line


def test_inspect_names_what_is_unknown_or_absent(library):
    with pytest.raises(ConfigError, match="'nope'"):
        inspect(library, "nope")
    with pytest.raises(LibraryError, match="holds no IR"):
        inspect(library, "tir")
    library.passes = []
    assert "passes" not in inspect(library)
    with pytest.raises(LibraryError, match="just built"):
        inspect(library, "passes")


def test_explain_says_what_serves_each_task_and_what_fell_back(library):
    text = explain(library)
    for part in (
        "compiled, key abc123",
        "fused_matmul: template:cpu_gemm, 2 calls",
        "tuned at rows=16: 12.5 us",
        "up to 45 rows: mr=4",
        "any size above: mr=6",
        "fell back: no record",
        "a later change in PyTorch is not seen): fc.weight",
        "1 of 2 tasks tuned",
    ):
        assert part in text
    library.executor, library.foreign = None, "this GPU is sm_80"
    assert "cannot run here: this GPU is sm_80" in explain(library)


def test_explain_lists_sizes_as_numbers(library):
    """A manifest's keys come back as sorted text."""
    ranges = {"<=1024": "c", "<=16": "a", "<=256": "b", "any": "d"}
    records = {"rows=128": "2 us", "rows=16": "1 us", "static": "3 us"}
    task = {**COVERAGE[0], "ranges": ranges, "records": records}
    library.manifest = replace(library.manifest, coverage=(task,))
    text = explain(library)
    assert [knobs for _, knobs in re.findall(r"(rows|above): (\w)$", text, re.M)] == list("abcd")
    assert re.findall(r"(\d) us", text) == ["1", "2", "3"]


def test_tuning_notice():
    assert tuning_notice(COVERAGE[:1]) == "1 of 1 tasks tuned"
    assert "tvmcap tune" in tuning_notice(COVERAGE)
    assert tuning_notice(COVERAGE[2:]) == ""


def test_verification_table():
    good = Comparison("out0", "float32", (4, 4), max_abs=1e-7, eager_abs=2e-7, budget=4e-7)
    wrong = Comparison("out1", "float32", (4, 4), max_abs=1.5, budget=4e-7, bad=3, index=(1, 2))
    checks = (Check("normal", {"B": 4}, (good, wrong)), Check("zeros", {"B": 4}, skipped="why not"))
    text = report.text(report.verify_table(VerifyReport(checks, "float64", 2)))
    for part in ("out1", "FAIL", "pass", "B=4", "why not", "NOT verified", "2 sets left out"):
        assert part in text


def test_unsteady_timings_are_said_to_be():
    def at(p90):
        times = {"latency_us": Latency(10.0, 9.0, 11.0), "eager_us": Latency(20.0, 19.0, p90)}
        return Score({}, 1, 1, 1.0, 0, 0, speedup=2.0, **times)

    for score, unsteady in ((at(21.0), False), (at(60.0), True)):
        walk = [SimpleNamespace(name="a step", score=score)]
        for shown in (report.score_table(score), report.walk_table(walk)):
            assert ("timings spread" in report.text(shown)) == unsteady


def test_findings_and_plain_rows():
    found = [Finding("nvcc", "warn", "none", "install it"), Finding("tvm", "ok", "0.27")]
    text = report.text(report.findings_table(found))
    assert "install it" in text and "warn" in text
    rows = [{"a": 1.23456789, "b": None, "c": {"k": 1}}]
    assert "1.235" in report.text(report.dict_table("T", rows)) and "k: 1" in report.text(
        report.dict_table("T", rows)
    )


def test_bytes():
    assert [report.bytes_text(n) for n in (None, 12, 2048, 3 << 20, 5 << 30)] == [
        "-",
        "12 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.00 GiB",
    ]
    large = {"a": 12345.678, "b": 9876.54}
    assert "12346" in report.text(report.dict_table("T", [large]))


def test_the_walk_says_how_much_of_its_last_step_is_tuned():
    score = Score({}, 1, 1, 1.0, 0, 0, tuned_tasks=1, tasks=3)
    walk = [SimpleNamespace(name=name, score=score) for name in ("no fuse", "with records")]
    assert "with records: 1 of 3 tasks tuned" in report.text(report.walk_table(walk))


def test_names_stand_in_the_order_of_their_numbers():
    names = ["k2[B=4]", "k10[B=4]", "k[B=1]", "k[B=16]", "k[B=128]"]
    assert sorted(random.sample(names, len(names)), key=by_numbers) == names
