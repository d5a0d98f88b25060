"""Config: where values come from, what is refused, and what a wrong name is nearest to."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from tvmcap.base.config import FIELDS, Config, Dim, make_config, parse_option
from tvmcap.base.errors import ConfigError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_defaults() -> None:
    config = make_config()
    assert config == Config()
    assert (config.tune, config.verify, config.target, config.disable, config.constants) == (
        "cached",
        True,
        None,
        (),
        (),
    )


def test_call_over_environment_over_file_over_default(tmp_path, monkeypatch) -> None:
    (tmp_path / "tvmcap.toml").write_text(
        'seed = 1\nworkers = 2\ntune = "none"\nconstants = ["w", "b"]\n'
    )
    assert make_config() == Config(seed=1, workers=2, tune="none", constants=("w", "b"))
    monkeypatch.setenv("TVMCAP_SEED", "7")
    monkeypatch.setenv("TVMCAP_TUNE", "12")
    assert make_config() == Config(seed=7, workers=2, tune=12, constants=("w", "b"))
    assert make_config(seed=9, tune="cached") == Config(seed=9, workers=2, constants=("w", "b"))


def test_a_config_is_taken_as_it_is(tmp_path, monkeypatch) -> None:
    (tmp_path / "tvmcap.toml").write_text("seed = 1\n")
    monkeypatch.setenv("TVMCAP_WORKERS", "3")
    assert make_config(Config(seed=4)) == Config(seed=4)
    assert make_config(Config(seed=4), workers=5) == Config(seed=4, workers=5)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("tragets", "target"), ("dynamics", "dynamic"), ("chache_dir", "cache_dir"), ("Tune", "tune")],
)
def test_an_unknown_name_names_the_nearest(wrong, near) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{wrong}'; did you mean '{near}'"):
        make_config(**{wrong: 1})
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        make_config(Config(), **{wrong: 1})


def test_a_name_near_nothing_lists_all() -> None:
    with pytest.raises(ConfigError, match="known: target, dynamic"):
        make_config(zzzzzz=1)


def test_unknown_names_in_file_and_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TVMCAP_SEEED", "1")
    with pytest.raises(ConfigError, match=r"TVMCAP_SEEED.*did you mean 'seed'"):
        make_config()
    monkeypatch.delenv("TVMCAP_SEEED")
    (tmp_path / "tvmcap.toml").write_text("verifyy = true\n")
    with pytest.raises(ConfigError, match=r"tvmcap\.toml.*did you mean 'verify'"):
        make_config()


def test_a_file_that_is_no_toml(tmp_path) -> None:
    (tmp_path / "tvmcap.toml").write_text("seed = = 1\n")
    with pytest.raises(ConfigError, match=r"cannot read tvmcap\.toml"):
        make_config()
    (tmp_path / "tvmcap.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot read tvmcap\.toml"):
        make_config()


@pytest.mark.parametrize(
    ("options", "say"),
    [
        ({"tune": "chached"}, "tune: expected 'cached', 'none' or a number.*got 'chached'"),
        ({"tune": 0}, "at least 1"),
        ({"tune": True}, "expected 'cached', 'none' or a number"),
        ({"tune": 2.5}, "expected 'cached', 'none' or a number"),
        ({"budget_s": 0}, "positive"),
        ({"budget_s": math.nan}, "positive"),
        ({"seed": -1}, "from 0"),
        ({"memory_budget": 1.5}, "a number from 0"),
        ({"workers": 0}, "at least 1"),
        ({"rpc": "here:9190"}, "key is missing"),
        ({"key": "h200"}, "rpc is missing"),
        ({"rpc": "here", "key": "h200"}, "rpc: expected the HOST:PORT"),
        ({"rpc": "here:99999", "key": "h200"}, "rpc: expected the HOST:PORT"),
        ({"rpc": "here:9190", "key": "my card"}, "key: expected a name without spaces"),
    ],
    ids=str,
)
def test_values_that_are_refused(options, say) -> None:
    with pytest.raises(ConfigError, match=say):
        make_config(**options)


WRONG_TYPES = [
    ("constants", 3),
    ("constants", {"w": 1}),
    ("disable", [1]),
    ("seed", "x"),
    ("seed", True),
    ("seed", 1.5),
    ("workers", "two"),
    ("workers", 2.0),
    ("budget_s", "3"),
    ("log_dir", 3),
    ("cache_dir", 5),
    ("dump", True),
    ("dynamic", "x"),
    ("verify", "no"),
    ("verify", 1),
    ("allow_tf32", 1),
    ("allow_tf32", None),
    ("tune", [3]),
    ("target", 3),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES, ids=str)
def test_a_wrong_type_is_named_with_what_is_expected(name, value) -> None:
    words = rf"^{name}: expected .+, got {re.escape(repr(value))}$"
    for make in (Config, make_config, lambda **options: make_config(Config(), **options)):
        with pytest.raises(ConfigError, match=words):
            make(**{name: value})


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("constants = 3", "constants"),
        ("seed = 'x'", "seed"),
        ("verify = 'no'", "verify"),
        ("cache_dir = 5", "cache_dir"),
        ("budget_s = '3'", "budget_s"),
        ("dynamic = 'x'", "dynamic"),
    ],
)
def test_a_wrong_type_in_the_file(tmp_path, line, name) -> None:
    (tmp_path / "tvmcap.toml").write_text(line + "\n")
    with pytest.raises(ConfigError, match=rf"^tvmcap\.toml: {name}: expected .+, got"):
        make_config(seed=3)


@pytest.mark.parametrize(
    ("name", "text"),
    [("SEED", "x"), ("SEED", "-1"), ("WORKERS", "two"), ("BUDGET_S", "nan"), ("TUNE", "lots")],
)
def test_a_wrong_value_in_the_environment(monkeypatch, name, text) -> None:
    monkeypatch.setenv(f"TVMCAP_{name}", text)
    with pytest.raises(ConfigError, match=rf"^TVMCAP_{name}: .*{name.lower()}.*expected"):
        make_config()


def test_a_config_that_is_none() -> None:
    for wrong in ({}, "llvm"):
        with pytest.raises(ConfigError, match=r"^config: expected a tvmcap\.Config, got"):
            make_config(wrong)


def test_an_empty_path_is_the_default(tmp_path, monkeypatch) -> None:
    (tmp_path / "tvmcap.toml").write_text('log_dir = "logs"\ndump = ""\n')
    for name in ("CACHE_DIR", "LOG_DIR"):
        monkeypatch.setenv(f"TVMCAP_{name}", "")
    assert make_config() == Config(log_dir="logs")
    assert make_config(log_dir="").log_dir is None


def test_what_counts_as_a_path_and_as_a_number(tmp_path) -> None:
    assert Config(cache_dir=tmp_path).cache_dir == str(tmp_path)
    config = Config(seed=np.int64(3), workers=np.int32(2), tune=np.int64(5))
    assert config == Config(seed=3, workers=2, tune=5)
    assert config.to_json() == Config(seed=3, workers=2, tune=5).to_json()
    assert Dim("B", max=np.int64(8)) == Dim("B", max=8)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("verify", "no", False),
        ("verify", "TRUE", True),
        ("allow_tf32", "1", True),
        ("allow_tf32", "false", False),
        ("disable", "fuse,layout", ("fuse", "layout")),
        ("constants", "w", ("w",)),
        ("tune", "64", 64),
        ("tune", "none", "none"),
        ("target", "cuda:sm_80", "cuda:sm_80"),
        ("target", '{"kind": "llvm"}', {"kind": "llvm"}),
        ("workers", "4", 4),
        ("budget_s", "2.5", 2.5),
        ("log_dir", "/tmp/x", "/tmp/x"),
    ],
)
def test_values_from_text(name, text, value) -> None:
    assert parse_option(name, text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("verify", "perhaps"), ("workers", "four"), ("budget_s", "long"), ("target", "{kind}")],
)
def test_text_that_is_no_value(name, text) -> None:
    with pytest.raises(ConfigError, match=f"cannot read {name}"):
        parse_option(name, text)


@pytest.mark.parametrize("name", ["dynamic", "calibration"])
def test_what_no_text_can_give(name, monkeypatch) -> None:
    monkeypatch.setenv(f"TVMCAP_{name.upper()}", "x")
    with pytest.raises(ConfigError, match="in Python"):
        make_config()


def test_switches_of_the_process_are_no_options(monkeypatch) -> None:
    monkeypatch.setenv("TVMCAP_CHECK", "1")
    assert make_config() == Config()


def test_tf32_changes_the_code_and_has_a_source_of_every_kind(monkeypatch, tmp_path) -> None:
    assert not Config().allow_tf32
    plain, allowed = (Config(allow_tf32=v).to_json(only_code=True) for v in (False, True))
    assert plain != allowed and allowed["allow_tf32"] is True
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tvmcap.toml").write_text("allow_tf32 = true\n")
    assert make_config().allow_tf32
    monkeypatch.setenv("TVMCAP_ALLOW_TF32", "0")
    assert not make_config().allow_tf32
    assert make_config(allow_tf32=True).allow_tf32


def test_a_string_is_a_list_of_names() -> None:
    assert Config(disable="fuse,layout").disable == ("fuse", "layout")
    assert Config(constants="w").constants == ("w",)
    assert Config(constants=["w", "b"]).constants == ("w", "b")


def test_json_of_a_config() -> None:
    config = Config(
        target={"kind": "llvm"}, dynamic={"x": {0: Dim("B", max=8)}, 1: {0: "B"}}, tune=3, workers=4
    )
    data = config.to_json()
    assert json.loads(json.dumps(data)) == data and set(data) == set(FIELDS)
    assert data["dynamic"] == {"x": {"0": {"name": "B", "min": 0, "max": 8}}, "1": {"0": "B"}}


def test_only_code_leaves_out_what_cannot_change_the_library(tmp_path) -> None:
    one = Config(workers=1, verify=False, log_dir="a", cache_dir="b", dump="c", budget_s=1)
    assert one.to_json(only_code=True) == Config().to_json(only_code=True)
    for change in (
        {"seed": 1},
        {"disable": ("fuse",)},
        {"tune": 5},
        {"dynamic": {0: {0: "B"}}},
    ):
        assert Config(**change).to_json(only_code=True) != Config().to_json(only_code=True)


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 3


BAD_DIMS = [("2B",), ("",), ("B", -1), ("B", 1, 0), ("B", 5, 4)]
BAD_DIMS += [(3,), ("B", "1"), ("B", 0, "9"), ("B", None), ("B", True), ("B", 1.0)]


@pytest.mark.parametrize("bad", BAD_DIMS, ids=str)
def test_dims_that_are_refused(bad) -> None:
    with pytest.raises(ConfigError, match="Dim"):
        Dim(*bad)


def test_dims() -> None:
    assert (Dim("B").min, Dim("B").max) == (0, None)
    assert Dim("B", min=0, max=1) == Dim("B", 0, 1)
