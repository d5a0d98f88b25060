"""Options of quantization and of calibration: what is taken, and what is refused by name."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import tvmcap
from tvmcap.base import ranges
from tvmcap.base.config import Config, make_config
from tvmcap.base.errors import ConfigError
from tvmcap.base.quantization import MAX_K, Quantize, parse
from tvmcap.base.ranges import Range, Ranges, Samples


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (None, None),
        ("int8", Quantize()),
        ("fp8-weight-only", Quantize(scheme="fp8-weight-only")),
        ("auto", Quantize(auto=True)),
        ({"scheme": "fp8", "keep": "head"}, Quantize(scheme="fp8", keep=("head",))),
        (Quantize(smooth=0.5), Quantize(smooth=0.5)),
    ],
)
def test_what_names_a_scheme(value, want) -> None:
    assert parse(value) == want
    assert Config(quantize=value).quantize == want


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("int4", "expected one of int8, .*got 'int4'"),
        (8, "got 8"),
        ({"schema": "int8"}, "unknown field 'schema'; did you mean 'scheme'"),
        ({"scheme": "int4"}, "scheme: expected one of"),
        ({"activations": "batch"}, "activations: expected one of token, static"),
        ({"method": "median"}, "method: expected one of minmax"),
        ({"smooth": 1.5}, "smooth: expected a number from 0 to 1"),
        ({"percentile": 5}, "percentile: expected a number from 50 to 100"),
        ({"budget_db": "high"}, "budget_db: expected a finite number"),
        ({"budget_db": float("-inf")}, "budget_db: expected a finite number, got -inf"),
        ({"keep": 3}, "keep: expected names or patterns"),
        ({"auto": 1}, "auto: expected True or False"),
        ({"scheme": "int8-weight-only", "activations": "static"}, "leaves activations as they are"),
    ],
)
def test_what_no_scheme_is(value, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(quantize=value)


def test_sources_other_than_the_call(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tvmcap.toml").write_text('[quantize]\nscheme = "fp8"\nkeep = ["head"]\n')
    assert make_config().quantize == Quantize(scheme="fp8", keep=("head",))
    monkeypatch.setenv("TVMCAP_QUANTIZE", "int8-weight-only")
    assert make_config().quantize == Quantize(scheme="int8-weight-only")
    monkeypatch.setenv("TVMCAP_QUANTIZE", "int5")
    with pytest.raises(ConfigError, match=r"TVMCAP_QUANTIZE: .*int5"):
        make_config()


def test_layers_are_kept_by_name_and_pattern() -> None:
    options = Quantize(keep=("head", "blocks.*.gate.*"))
    assert options.keeps("head.weight") and options.keeps("head")
    assert options.keeps("blocks.3.gate.weight")
    assert not options.keeps("blocks.3.up.weight") and not options.keeps("header.weight")


def test_a_weight_that_two_layers_use_is_kept_in_both() -> None:
    for name in ("head", "head.weight", "h*"):
        options = Quantize(keep=(name,))
        assert options.keeps("head.weight") and options.keeps("head.weight#2")
    second = Quantize(keep=("head.weight#2",))
    assert second.keeps("head.weight#2") and not second.keeps("head.weight")


def test_the_longest_sum_fits_and_the_next_does_not() -> None:
    assert MAX_K * 127**2 < 2**31 <= (MAX_K + 1) * 127**2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "there are no inputs"),
        (iter(()), "there are no inputs"),
        (3, "expected an iterable of inputs.*got int"),
        (np.zeros(3), "expected an iterable of inputs.*got ndarray"),
        ({"x": 1}, "got dict"),
        ("nowhere.json", "cannot read ranges from nowhere.json"),
    ],
)
def test_what_calibration_is_not(value, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(quantize="int8", calibration=value)


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="no effect without quantize"):
        Config(calibration=[np.zeros(3)])
    with pytest.raises(ConfigError, match="choose one"):
        Config(quantize="int8", vendor_matmul=True)


def test_samples_are_read_once_and_their_values_change_the_code() -> None:
    one = Config(quantize="int8", calibration=(np.full(3, i) for i in range(2)))
    assert isinstance(one.calibration, Samples) and len(one.calibration.inputs) == 2
    same = Config(quantize="int8", calibration=[(np.full(3, 0),), [np.full(3, 1)]])
    other = Config(quantize="int8", calibration=[np.full(3, 0), np.full(3, 2)])
    codes = [c.to_json(only_code=True) for c in (one, same, other)]
    assert codes[0] == codes[1] != codes[2]
    json.dumps(codes)


def test_values_deep_in_an_argument_tell_samples_apart() -> None:
    def code(value):
        x = np.zeros(5000, np.float32)
        x[2500] = value
        return Samples((({"x": [x, None]},),)).to_json()

    assert code(0) == code(0) != code(1)
    assert Samples(((np.float32(1),),)).to_json() != Samples(((np.float64(1),),)).to_json()


def test_what_static_clips_depend_on() -> None:
    static = Quantize(activations="static", smooth=0.5)
    assert Quantize(smooth=0.5, method="mse").clipping == {}
    assert static.clipping == Quantize("fp8", "static", 0.5, ("a",), budget_db=3).clipping
    mse, fp8 = (Quantize(s, "static", method="mse").clipping for s in ("int8", "fp8"))
    percentiles = [
        Quantize(activations="static", method="percentile", percentile=p).clipping for p in (98, 99)
    ]
    others = [Quantize(activations="static").clipping, mse, fp8, *percentiles]
    assert all(static.clipping != other for other in others)
    assert all(a != b for i, a in enumerate(others) for b in others[:i])


def test_ranges_survive_their_file(tmp_path) -> None:
    clipping = Quantize(activations="static", smooth=0.5).clipping
    found = Ranges({"a.weight": Range(-1.5, 2.0, 1.75, (0.1, 2.0))}, ("b.weight",), clipping)
    path = found.save(tmp_path / "ranges.json")
    assert tvmcap.Ranges.load(path) == found
    assert Config(quantize="int8", calibration=path).calibration == found


WHOLE = {"low": 0, "high": 1, "clip": 1, "channels": []}


@pytest.mark.parametrize(
    "data",
    [
        [],
        {"format": "other", "layers": {}, "kept": []},
        {"format": ranges.FORMAT, "layers": {}, "kept": []},
        {"format": ranges.FORMAT, "layers": {"a": {}}, "kept": [], "clipping": {}},
        {"format": ranges.FORMAT, "layers": {}, "kept": "a.weight", "clipping": {}},
        *(
            {"format": ranges.FORMAT, "layers": {"a": {**WHOLE, **odd}}, "kept": [], "clipping": {}}
            for odd in (
                {"clip": -1},
                {"clip": 1e-300},
                {"high": 1e300},
                {"high": 10**400},
                {"low": "0"},
                {"low": True},
                {"channels": "12"},
                {"channels": [math.nan]},
            )
        ),
    ],
)
def test_files_that_hold_no_ranges(data, tmp_path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="calibrate again"):
        Ranges.load(path)


def test_files_that_are_no_json_or_cannot_be_written(tmp_path) -> None:
    path = tmp_path / "bad.json"
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot read ranges from"):
            Ranges.load(path)
    with pytest.raises(ConfigError, match="cannot write the ranges to"):
        Ranges().save(tmp_path / "nowhere" / "ranges.json")
    Ranges({"a": Range(0, 1, 1)}).save(path)
    assert Ranges.load(path).layers and [p.name for p in tmp_path.iterdir()] == ["bad.json"]
