"""A build that measures nothing: where there is a model its choice, and explain says so."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import tvmcap
from tvmcap.base.codegen import make_target
from tvmcap.base.config import Config
from tvmcap.kernel import models
from tvmcap.kernel.cost_model import RankModel
from tvmcap.kernel.dataset import Group
from tvmcap.kernel.records import RecordStore
from tvmcap.kernel.stores import open_stores
from tvmcap.kernel.template import source_hash
from tvmcap.schedules import cpu_gemm


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(48, 80)

    def forward(self, x):
        return torch.relu(self.linear(x))


def model_against_unrolling() -> RankModel:
    """Return a model of the CPU GEMM whose records were the faster the less was unrolled."""
    names = cpu_gemm.TEMPLATE.feature_names
    column = names.index("unroll")
    rng = np.random.default_rng(0)
    groups = []
    for g in range(6):
        rows = rng.integers(1, 9, (60, len(names))).astype(np.float32)
        times = 10.0 + rows[:, column]
        groups.append(Group(str(g), rows, tuple(times), {}, {}))
    model = RankModel(0, names)
    model.pretrain(groups, "made up")
    return model


def test_the_choice_of_a_model_serves_and_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = Layer().eval(), torch.randn(24, 48)
    options = {"target": "llvm", "log_dir": str(tmp_path / "logs"), "verify": False}
    options["cache_dir"] = str(tmp_path / "cache")
    plain = tvmcap.build(layer, (x,), **options)
    assert "the template's default" in plain.explain()
    target = make_target("llvm")
    models.save(model_against_unrolling(), tmp_path / "logs", "cpu_gemm", target)
    chosen = tvmcap.build(layer, (x,), **options)
    assert not chosen.from_cache  # the model is part of what decides
    assert "the cost model's choice (cpu_gemm.model.json, 360 measurements)" in chosen.explain()
    (served,) = (s for s in chosen.manifest.coverage if "cpu_gemm" in s["served_by"])
    assert not served["tuned"] and '"unroll":1}' in served["ranges"]["any"]
    torch.testing.assert_close(torch.as_tensor(chosen(x)), layer(x), atol=1e-5, rtol=1e-5)
    rule = tvmcap.build(layer, (x,), tune="none", **options)
    assert "cost model" not in rule.explain()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, torch.Tensor, Path]:
    """Return a layer, its input and a folder with a few measurements of it."""
    folder = tmp_path_factory.mktemp("tuned")
    layer, x = Layer().eval(), torch.randn(24, 48)
    run = tvmcap.tune(layer, (x,), trials=3, target="llvm", log_dir=str(folder), workers=1)
    assert run.trials == 3 and not run.failures
    return layer, x, folder


def served(lib) -> dict:
    (found,) = (s for s in lib.manifest.coverage if "cpu_gemm" in s["served_by"])
    return found


def test_an_exact_record_decides_before_the_model(tuned, tmp_path: Path) -> None:
    layer, x, folder = tuned
    logs = shutil.copytree(folder, tmp_path / "logs")
    models.save(model_against_unrolling(), logs, "cpu_gemm", make_target("llvm"))
    options = {"target": "llvm", "verify": False, "cache_dir": str(tmp_path / "cache")}
    lib = tvmcap.build(layer, (x,), log_dir=str(logs), **options)
    latest = {r.candidate: r for r in RecordStore(logs).records}
    best = min(latest.values(), key=lambda r: r.median_us or np.inf)
    assert served(lib)["tuned"] and served(lib)["ranges"] == {"any": best.candidate}
    assert "cost model" not in lib.explain()
    other = tvmcap.build(layer, (torch.randn(40, 48),), log_dir=str(logs), **options)
    assert "the cost model's choice" in served(other)["reason"] and not served(other)["tuned"]


@pytest.mark.parametrize(
    "change, status",
    [
        ({"target": {"kind": "llvm", "arch": "z80"}}, "other_target"),
        ({"tvm": "0.1"}, "other_tvm"),
        ({"template_hash": "of another source"}, "stale_template"),
        (None, "bad_lines"),
    ],
)
def test_records_that_do_not_count_are_kept_and_leave_the_choice_to_others(
    tuned, tmp_path: Path, change: dict | None, status: str
) -> None:
    layer, x, folder = tuned
    store = RecordStore(tmp_path / "logs")
    found = RecordStore(folder).records
    if change is None:
        store.folder.mkdir()
        store.path.write_text("".join(r.to_line()[:-9] + "\n" for r in found))
    else:
        target = {**found[0].target, **change.get("target", {})}
        store.append(dataclasses.replace(r, **{**change, "target": target}) for r in found)
    before = store.path.read_bytes()
    options = {"target": "llvm", "verify": False, "cache_dir": str(tmp_path / "cache")}
    lib = tvmcap.build(layer, (x,), log_dir=str(store.folder), **options)
    assert not served(lib)["tuned"] and "no record; the template's default" in lib.explain()
    config, target = Config(log_dir=str(store.folder)), make_target("llvm")
    counted = open_stores(config, target).stats(
        target, {"cpu_gemm": source_hash(cpu_gemm.TEMPLATE)}
    )
    assert counted["status"][status] == len(found) and not counted["status"].get("ok")
    if status == "stale_template":
        run = tvmcap.tune(layer, (x,), trials=1, target="llvm", log_dir=str(store.folder))
        assert run.trials == 1  # the default once more: nobody measured it here
    assert store.path.read_bytes().startswith(before)


@pytest.mark.parametrize(
    "knobs",
    [
        {"nv": 3},  # leaves columns out
        {"nv": 0},
        {"mr": 0},
        {"unroll": 0},
        {"mr": "6"},
        None,
    ],
)
def test_a_setting_that_no_space_holds_serves_nobody(
    tuned, tmp_path: Path, knobs: dict | None
) -> None:
    """Though its line is whole and its time the best: the next best serves."""
    layer, x, folder = tuned
    found = RecordStore(folder).records
    last = found[-1]
    made_up = {"of": "another"} if knobs is None else {**(last.knobs or {}), **knobs}
    store = RecordStore(tmp_path / "logs")
    store.append([*found, dataclasses.replace(last, knobs=made_up, median_us=0.01)])
    options = {"target": "llvm", "verify": False, "cache_dir": str(tmp_path / "cache")}
    options["log_dir"] = str(store.folder)
    lib = tvmcap.build(layer, (x,), **options)
    latest = {r.candidate: r for r in found}
    best = min(latest.values(), key=lambda r: r.median_us or np.inf)
    assert served(lib)["ranges"] == {"any": best.candidate}
    torch.testing.assert_close(torch.as_tensor(lib(x)), layer(x), atol=1e-5, rtol=1e-5)


def test_tuning_goes_on_beside_a_record_that_cannot_be(tuned, tmp_path: Path) -> None:
    layer, x, folder = tuned
    last = RecordStore(folder).records[-1]
    store = RecordStore(tmp_path / "logs")
    store.append([dataclasses.replace(last, knobs={"of": "another"}, median_us=0.01)])
    run = tvmcap.tune(layer, (x,), trials=1, target="llvm", log_dir=str(store.folder), workers=1)
    assert run.trials == 1 and not run.failures


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": {"rows": "24"}},
        {"sizes": {"rows": 0}},
        {"sizes": {"rows": True}},
        {"sizes": {"rows": 2.5}},
        {"error": {}},
        {"error": {"cause": 1, "message": ""}},
    ],
)
def test_lines_that_no_measurement_wrote_are_bad(tuned, tmp_path: Path, change: dict) -> None:
    last = RecordStore(tuned[2]).records[-1]
    store = RecordStore(tmp_path)
    store.append([last, dataclasses.replace(last, **change)])
    assert store.bad_lines == 1 and store.records == [last]


@pytest.mark.parametrize("sizes", [{}, {"columns": 24}, {"rows": 24, "s0": 3}])
def test_records_of_sizes_that_a_task_has_not_are_left_out(
    tuned, tmp_path: Path, sizes: dict[str, int]
) -> None:
    layer, x, folder = tuned
    store = RecordStore(tmp_path / "logs")
    store.append([dataclasses.replace(RecordStore(folder).records[-1], sizes=sizes)])
    options = {"target": "llvm", "verify": False, "cache_dir": str(tmp_path / "cache")}
    lib = tvmcap.build(layer, (x,), log_dir=str(store.folder), **options)
    assert not served(lib)["tuned"]
