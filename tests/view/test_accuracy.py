"""The report as text, JSON and a page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tvmcap.base.accuracy import Accuracy, AccuracyReport
from tvmcap.base.errors import ConfigError, LibraryError
from tvmcap.view.accuracy import html, text, write

UP = Accuracy("up.weight", "int8", 31.25, 38.0, 0.9996, 0.125, 0.015, 4096, 1088)
HEAD = Accuracy("head.weight", "kept", 35.0, None, 0.9999, 0.01, 0.0, 1024, 1024)
OUT = Accuracy("out0", "", 29.5, None, 0.999, 0.5)
REPORT = AccuracyReport((OUT,), (UP, HEAD), 30.0, 2, "inputs held out of calibration", 6144, 3136)


def test_the_table_says_what_was_measured() -> None:
    lines = text(REPORT).splitlines()
    assert lines[0] == ("quantized: OUTSIDE the budget of 30 dB (2 inputs held out of calibration)")
    assert lines[2].split() == ["out0", "output", "29.5", "0.999000", "0.5"]
    row = "up.weight int8 31.2 38.0 0.999600 0.125 1.50% 4.0 -> 1.1"
    assert lines[3].split() == row.split()
    assert lines[4].split()[:3] == ["head.weight", "kept", "35.0"]
    assert lines[-1] == "weights: 5.0 KiB before, 2.1 KiB after (0.412x)"


def test_the_library_before_is_what_it_would_be_with_the_tensors_as_they_were() -> None:
    made = replace(REPORT, library_after=10_240)
    assert made.library_before == 10_240 + 6144 - 3136
    assert text(made).splitlines()[-1] == "library: 12.9 KiB before, 10.0 KiB after (0.773x)"
    assert AccuracyReport.from_json(json.loads(json.dumps(made.to_json()))) == made


class Page(HTMLParser):
    """Reads the cells of each row, and what the page asks for from elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.open, self.elsewhere, self.styles = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        attrs = dict(attrs)
        self.elsewhere += [value for name, value in attrs.items() if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
            self.styles.append(attrs.get("class"))
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th", "div"):
            self.rows[-1][-1] += data


def test_the_page_has_the_cells_of_the_table_and_stands_alone() -> None:
    odd = replace(UP, name="<b>&up", sqnr_db=-math.inf)
    made = replace(REPORT, layers=(odd, HEAD), library_after=10_240)
    page = Page(html(made, "a < b"))
    assert page.open == [] and page.elsewhere == []
    cells = [" ".join(row).split() for row in page.rows]
    lines = text(made).splitlines()
    assert cells == [" ".join(line.split()).split() for line in lines[1:-2]]
    assert page.styles == [None, "low", "low", None]
    assert "library: 12.9 KiB before" in html(made) and "OUTSIDE the budget" in html(made)
    assert "a &lt; b" in html(made, "a < b")


def test_the_suffix_of_a_file_says_its_form(tmp_path) -> None:
    assert write(REPORT, tmp_path / "r.html").read_text() == html(REPORT)
    assert write(REPORT, tmp_path / "r.txt").read_text() == text(REPORT) + "\n"
    data = json.loads(write(REPORT, tmp_path / "r.json").read_text())
    assert AccuracyReport.from_json(data) == REPORT
    assert [x["name"] for x in data["layers"]] == ["up.weight", "head.weight"]
    with pytest.raises(ConfigError, match=r"r\.pdf: expected .* \.html, \.json or \.txt"):
        write(REPORT, tmp_path / "r.pdf")
    with pytest.raises(LibraryError, match="cannot be written"):
        write(REPORT, tmp_path / "nowhere" / "r.html")
