"""Builds without a measurement: an exact record, else the model's choice, else the default."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from tests.kernel.model_cases import made_up_us, record, records
from tests.schedules.products import TARGET, product
from tvmcap.kernel import apply, choice, models, spaces, tasks
from tvmcap.kernel.records import RecordStore
from tvmcap.kernel.stores import Stores
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules.hopper_columns import Sizes, sizes_of

STATIC = {"n": 4096, "k": 1024, "rows": 1024}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    model = models.train(records(count=60), hopper.TEMPLATE, TARGET)
    models.save(model, path, "hopper_gemm", TARGET)
    return path


@pytest.fixture
def chooser(folder: Path) -> choice.Chooser:
    store = RecordStore(folder)
    return choice.Chooser(Stores((store,), store), TARGET)


def task_of(**kwargs) -> tasks.Task:
    return tasks.make_task(product(**kwargs), TARGET, spaces.find, {"B": (1, 8192)})


def serve(task, found, choose):
    made, served = apply._serve(task, found, TARGET, choose)
    assert len(made) == len(served.ranges)
    return served


def as_record(rows: int, knobs):
    return record(Sizes(rows, 4096, 1024), knobs, 5.0)


def test_the_choice_is_what_the_model_puts_first(chooser) -> None:
    """In the made-up times a group of 16 is faster, and columns are slower."""
    found = chooser(task_of(**STATIC))
    assert found is not None and list(found.knobs) == [1024]
    assert "hopper_gemm.model.json, 600 measurements" in found.model
    knobs = found.knobs[1024]
    assert knobs.group == 16 and knobs.groups != "columns"
    gemm = hopper.match(product(**STATIC), TARGET)
    assert hopper.fits(gemm, knobs)
    points = [k for k in hopper.space(gemm, TARGET) if not k.swapped]
    times = made_up_us(sizes_of(gemm), points)
    assert made_up_us(sizes_of(gemm), [knobs])[0] < 1.1 * times.min()


def test_nothing_far_behind_in_the_estimate_is_chosen(chooser) -> None:
    gemm = hopper.match(product(**STATIC), TARGET)
    model, _ = models.find(chooser.stores, hopper.TEMPLATE, TARGET)

    class Upside:
        def margins(self, rows):
            return -model.margins(rows)

    worst = choice.best(Upside(), hopper.TEMPLATE, gemm, TARGET)
    times = np.array(hopper.estimate(gemm, hopper.space(gemm, TARGET), TARGET))
    assert hopper.estimate(gemm, [worst], TARGET)[0] <= 1.5 * times.min()


def test_an_exact_record_comes_first(chooser) -> None:
    task = task_of(**STATIC)
    odd = hopper.Knobs(64, 64, 64, 2, "tiles", group=4)
    served = serve(task, [as_record(1024, odd)], chooser)
    assert list(served.ranges.values()) == [hopper.TEMPLATE.knobs_to_json(odd)]
    assert served.tuned and served.reason == ""


def test_a_record_of_other_rows_gives_way_to_the_model(chooser) -> None:
    task = task_of(**STATIC)
    odd = hopper.Knobs(64, 64, 64, 2, "tiles", group=4)
    served = serve(task, [as_record(512, odd)], chooser)
    assert list(served.ranges.values()) == [
        hopper.TEMPLATE.knobs_to_json(chooser(task).knobs[1024])
    ]
    assert not served.tuned
    assert "no record at 1024 rows; the cost model's choice (hopper_gemm" in served.reason


def test_without_a_model_the_default(tmp_path: Path) -> None:
    task = task_of(**STATIC)
    store = RecordStore(tmp_path)
    served = serve(task, [], choice.Chooser(Stores((store,), store), TARGET))
    default = hopper.default(task.problem, TARGET)
    assert list(served.ranges.values()) == [hopper.TEMPLATE.knobs_to_json(default)]
    assert "no record; the template's default" in served.reason


def test_a_symbolic_number_of_rows_has_a_choice_at_each_size(chooser) -> None:
    task = task_of(n=4096, k=1024)
    found = chooser(task)
    assert list(found.knobs) == [1, 16, 128, 512, 2048, 8192]
    odd = hopper.Knobs(64, 64, 64, 2, "tiles", group=4)
    known = [as_record(512, odd)]
    rest = chooser(task, [512])
    assert rest == choice.Choice({n: k for n, k in found.knobs.items() if n != 512}, found.model)
    ranged = apply._choose(task, known, TARGET, rest)
    wanted = {**rest.knobs, 512: odd}
    for rows in (1, 512, 2048, 8192):  # 16 rows are not worth a kernel between two equal ones
        serving = next(k for bound, k in ranged if bound is None or rows <= bound)
        assert serving == wanted[rows]
    missing = apply._missing(known, rest)
    assert missing.startswith("no record at 1, 16, 128, 2048, 8192 rows; the cost model's choice")


def test_a_refused_model_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "hopper_gemm.model.json").write_text("nonsense")
    store = RecordStore(tmp_path)
    choose = choice.Chooser(Stores((store,), store), TARGET)
    with caplog.at_level(logging.WARNING, "tvmcap"):
        assert choose(task_of(**STATIC)) is None and choose(task_of(n=4096, k=1024)) is None
    assert caplog.text.count("is no cost model") == 1
