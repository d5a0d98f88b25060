"""The report of a store: data, page and picture."""

from __future__ import annotations

import dataclasses
import datetime
import html.parser
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from tests.kernel.model_cases import SHAPES, records
from tvmcap.base.errors import ConfigError, RecordError, ToolchainError
from tvmcap.kernel.records import RecordStore
from tvmcap.kernel.stores import Stores
from tvmcap.view import page, plots
from tvmcap.view.tuning import TuningReport, tuning_report, usual_target

START = datetime.datetime(2026, 11, 29, 12, tzinfo=datetime.timezone.utc)


def dated(made: list, every: float = 2.0, failing: int = 10) -> list:
    """Return records with dates, one in so many a failure."""
    found = []
    for i, r in enumerate(made):
        date = (START + datetime.timedelta(seconds=every * i)).isoformat(timespec="seconds")
        r = dataclasses.replace(r, date=date)
        if i % failing == failing - 1:
            cause = {"cause": "<timeout>" if i % 4 == 1 else "wrong", "message": "no"}
            r = dataclasses.replace(r, median_us=None, error=cause)
        found.append(r)
    return found


def stores_of(folder: Path, made: list) -> Stores:
    store = RecordStore(folder)
    store.append(made)
    return Stores((store,), store)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> TuningReport:
    made = dated(records(SHAPES[:3], (512,), 24))
    other = dataclasses.replace(made[0], target={**made[0].target, "arch": "sm_100a"})
    stale = dataclasses.replace(made[0], template_hash="old")
    old = dataclasses.replace(made[0], tvm="0.1")
    stores = stores_of(tmp_path_factory.mktemp("store"), [*made, other, stale, old])
    with stores.writer.path.open("a") as file:
        file.write("garbage\n")
    stores.writer.refresh()
    return tuning_report(stores, usual_target(stores))


def test_a_report_counts_what_it_shows_and_what_it_leaves_out(report) -> None:
    data = report.to_json()
    assert data["target"] == "cuda sm_90a" and data["measurements"] == 73
    assert data["status"] == {
        "ok": 65, "failed": 7, "other_target": 1, "other_tvm": 1, "stale_template": 1,
        "bad_lines": 1,
    }  # fmt: skip
    assert data["other_targets"] == {"cuda sm_100a": 1} and len(data["notes"]) == 4
    assert sum(data["causes"].values()) == 7 and set(data["causes"]) == {"<timeout>", "wrong"}
    assert data["seconds"] == 142.0 and len(data["tasks"]) == 4
    (model,) = data["models"]
    assert model["template"] == "hopper_gemm" and model["pairwise"] > 0.5
    assert len(model["predictions"]) == 3 and model["importance"]
    curve = data["tasks"][0]["curve"]
    best = [step[3] for step in curve]
    assert best == sorted(best, reverse=True) and best[-1] == data["tasks"][0]["best_us"]


class _Page(html.parser.HTMLParser):
    """Counts elements, and checks that those that are opened are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_shows_every_task(report) -> None:
    text = page.html_page(report)
    parser = _Page()
    parser.feed(text)
    assert parser.open == []
    assert parser.seen.count("svg") == 5 + len(report.histories)
    assert parser.seen.count("details") == len(report.histories)
    assert not re.search(r'(src|href)="(?!#|data:)', text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    asked = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
    assert len(ids) == len(set(ids)) and asked and set(asked) <= set(ids)
    for words in ("gemm n=4096 k=1024", "&lt;timeout&gt;", "records of cuda sm_100a", "wave_bytes"):
        assert words in text, words
    assert "<timeout>" not in text


def test_figures_hold_the_numbers(report) -> None:
    svgs = plots.panel_svgs(report)
    titles = ("against measurements", "against seconds", "Predicted", "Failures", "importance")
    for svg, title in zip(svgs, titles, strict=True):
        ET.fromstring(svg)
        assert title in svg
    assert "of 73 measurements" in svgs[3]
    (stale,) = (h for h in report.histories if h.key.template_hash == "old")
    task = plots.task_svg(report.histories[0], report)
    assert "best so far" in task and "Predicted" in task
    assert plots.task_svg(report.histories[0], report) == task, "the same report, the same file"
    assert "Predicted" not in plots.task_svg(stale, report)
    png = plots.overview_png(report)
    assert png.startswith(b"\x89PNG") and len(png) > 20_000


@pytest.mark.parametrize("case", ["without dates", "one failure", "one candidate", "few"])
def test_little_data_is_a_report_too(tmp_path: Path, case: str) -> None:
    made = {
        "without dates": lambda: records(SHAPES[:2], (512,), 20),
        "one failure": lambda: dated(records(SHAPES[:1], (512,), 1), failing=1),
        "one candidate": lambda: dated(records(SHAPES[:1], (512,), 1)),
        "few": lambda: dated(records(SHAPES[:2], (512,), 3)),
    }[case]()
    stores = stores_of(tmp_path, made)
    report = tuning_report(stores, usual_target(stores))
    text = page.html_page(report)
    assert plots.overview_png(report).startswith(b"\x89PNG")
    assert ("no dates" in text) == (case == "without dates")
    assert ("every measurement failed" in text) == (case == "one failure")
    assert ("Too few measurements" in text) == (case != "without dates")


def test_loop_nests_are_reported(tmp_path: Path) -> None:
    from tvmcap.kernel.loop_features import FEATURES, VERSION

    rng = np.random.default_rng()
    base = records(SHAPES[:1], (512,), 1)[0]
    made = []
    for i in range(30):
        row = rng.uniform(0, 4, len(FEATURES)).round(3)
        row[0] = VERSION
        values = {"kind": "trace", "template": None, "template_hash": None, "knobs": None}
        trace = [] if i == 0 else [[["Step", [i], [], []]], []]
        made.append(
            dataclasses.replace(
                base, **values, trace=trace, features=row.tolist(), median_us=float(row[-1] + 1)
            )
        )
    stores = stores_of(tmp_path, dated(made))
    report = tuning_report(stores, usual_target(stores))
    assert [j.template for j in report.judgements] == ["loop_nest"]
    assert "loop nest" in page.html_page(report)


def test_a_store_without_the_target_says_what_it_holds(tmp_path: Path) -> None:
    stores = stores_of(tmp_path, records(SHAPES[:1], (512,), 3))
    elsewhere = {**usual_target(stores), "arch": "sm_80"}
    with pytest.raises(RecordError, match=r"cuda sm_80 .*3 other_target.*--target"):
        tuning_report(stores, elsewhere)
    with pytest.raises(RecordError, match="nothing"):
        empty = stores_of(tmp_path / "empty", [])
        tuning_report(empty, usual_target(empty) or elsewhere)


def test_a_target_that_tvm_does_not_know_has_curves_and_no_model(tmp_path: Path) -> None:
    made = [
        dataclasses.replace(r, target={"kind": "llvm", "arch": "moon", "features": [], "cores": 2})
        for r in records(SHAPES[:2], (512,), 15)
    ]
    stores = stores_of(tmp_path, made)
    report = tuning_report(stores, usual_target(stores))
    assert report.measurements == 30 and report.judgements == ()
    assert any("moon" in note for note in report.notes)


def test_outputs_that_cannot_be_written_are_refused(report, tmp_path: Path, monkeypatch) -> None:
    for name, said in (("r.pdf", ".html or .png"), ("no/r.html", "no folder"), ("", ".html")):
        with pytest.raises(ConfigError, match=said):
            page.write_report(report, tmp_path / name)
    (tmp_path / "d.html").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        page.write_report(report, tmp_path / "d.html")
    assert [p.name for p in tmp_path.iterdir()] == ["d.html"]


def test_a_full_disk_leaves_the_old_page(report, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "r.png"
    path.write_text("old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        page.write_report(report, path)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_without_matplotlib_the_error_says_what_to_install(report, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ToolchainError, match=r"pip install 'tvmcap\[report\]'"):
        page.write_report(report, tmp_path / "r.html")
    assert report.to_json()["measurements"] == 73
