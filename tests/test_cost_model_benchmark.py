"""The benchmark of the cost model: its split, its metrics, its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import cost_model as benchmark
import cost_model_metrics as cm

from tests.kernel.model_cases import records
from tests.schedules.products import TARGET
from tvmcap.kernel import dataset
from tvmcap.kernel.records import RecordStore
from tvmcap.schedules import hopper_gemm as hopper


@pytest.fixture(scope="module")
def groups():
    return dataset.of_template(records(), hopper.TEMPLATE, TARGET)


def test_whole_pairs_of_k_and_n_are_held_out(groups) -> None:
    seen = set()
    for seed in range(5):
        train, test = benchmark.split(groups, {}, seed)
        learnt, held = ({benchmark.pair_of(g) for g in part} for part in (train, test))
        assert not learnt & held and len(held) == 2 and len(train) + len(test) == len(groups)
        assert all(len([g for g in test if benchmark.pair_of(g) == pair]) == 2 for pair in held)
        seen.add(frozenset(held))
    assert len(seen) > 1


def test_one_epilogue_is_held_out(groups) -> None:
    names = {g.workload["digest"]: "gelu" if g.workload["n"] > 1024 else "none" for g in groups}
    for seed in range(5):
        train, test = benchmark.split(groups, names, seed)
        kept = {benchmark.epilogue_of(g, names) for g in train}
        assert len(kept) == 1 and len(train) + len(test) == len(groups)


def test_metrics_of_a_known_order() -> None:
    times = np.array([10.0, 10.1, 20.0, 40.0])
    right = cm.metrics([cm.Scored(-times, times)])
    assert right == {"pairwise": 1.0, "best_of_1": 1.0, "best_of_5": 1.0, "top8_regret": 0.0}
    wrong = cm.metrics([cm.Scored(times, times)])
    assert wrong["pairwise"] == 0.0 and wrong["best_of_1"] == 0.25
    assert cm.metrics([cm.Scored(np.zeros(4), times)])["pairwise"] == 0.5
    late = np.arange(1.0, 11.0)
    assert cm.metrics([cm.Scored(late, late)])["top8_regret"] == pytest.approx(2.0)
    assert cm.dropped([times]) == pytest.approx(1 / 6)


def test_the_ceiling_is_what_measuring_again_confirms() -> None:
    assert cm.ceiling([[(1.0, 1.0), (2.0, 0.5), (3.0, 3.0)]]) == (pytest.approx(2 / 3), 3)
    assert cm.ceiling([[(1.0, 1.0)]]) == (None, 0)


def test_the_whole_of_it_on_made_up_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RecordStore(tmp_path / "logs").append(records())
    out, folder = tmp_path / "out.json", tmp_path / "models"
    arguments = f"--logs {tmp_path / 'logs'} --json {out} --write {folder} --seeds 2"
    monkeypatch.setattr(sys, "argv", ["cost_model.py", *arguments.split()])
    benchmark.main()
    found = json.loads(out.read_text())
    assert set(found["cuda"]) == {"ours", "ndcg", "regression", "prior", "random"}
    for row in found["cuda"].values():
        assert set(cm.NAMES) <= set(row)
        assert all(row["spread"][n][0] <= row[n] <= row["spread"][n][1] for n in cm.NAMES)
    ours, prior = found["cuda"]["ours"], found["cuda"]["prior"]
    assert ours["pairwise"] > prior["pairwise"] > 0.6 > found["cuda"]["random"]["pairwise"]
    assert found["data"]["cuda"]["candidates"] == 200
    assert (folder / "hopper_gemm.model.json").is_file()
    assert "pairwise" in capsys.readouterr().out
