"""Models in files: what they were learnt from and for, and what is refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from tests.kernel.model_cases import KNOBS, SHAPES, made_up_us, record, records
from tests.schedules.products import TARGET
from tvmcap.base import codegen
from tvmcap.base.errors import RecordError
from tvmcap.kernel import dataset, models
from tvmcap.kernel.fingerprint import fingerprint
from tvmcap.kernel.records import RecordStore
from tvmcap.kernel.stores import Stores
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules.hopper_columns import Sizes

UNSEEN = Sizes(1024, 6144, 1536)


@pytest.fixture(scope="module")
def model():
    return models.train(records(), hopper.TEMPLATE, TARGET)


@pytest.fixture
def saved(model, tmp_path: Path) -> Path:
    return models.save(model, tmp_path, "hopper_gemm", TARGET)


def margins(model, sizes=UNSEEN):
    return model.margins(hopper.features(sizes, KNOBS, TARGET))


def right(scores, times) -> float:
    i, j = np.triu_indices(len(times), 1)
    return float(((scores[i] > scores[j]) == (times[i] < times[j])).mean())


def test_ranks_a_shape_never_seen_better_than_the_estimate(model) -> None:
    times = made_up_us(UNSEEN, KNOBS)
    prior = -np.array(hopper.estimate(UNSEEN, KNOBS, TARGET))
    assert right(margins(model), times) > max(0.9, right(prior, times))


def test_a_file_is_what_was_saved_and_says_what_it_is(model, saved: Path) -> None:
    back = models.load(saved, hopper.TEMPLATE, TARGET)
    np.testing.assert_array_equal(margins(back), margins(model))
    assert (back.pretrained, back.objective) == (200, model.objective)
    assert back.source == dataset.data_hash(dataset.of_template(records(), hopper.TEMPLATE, TARGET))
    learner = json.loads(saved.read_text())["learner"]
    about = json.loads(learner["attributes"]["tvmcap"])
    assert about["features"] == list(hopper.FEATURES) and about["target"]["arch"] == "sm_90a"


@pytest.mark.parametrize(
    "names, said",
    [
        (hopper.FEATURES[1:], "with log_rows"),
        ((*hopper.FEATURES, "moon"), "without moon"),
        (hopper.FEATURES[::-1], "in another order"),
    ],
)
def test_other_features_are_refused_by_name(saved: Path, names, said) -> None:
    other = dataclasses.replace(hopper.TEMPLATE, feature_names=tuple(names))
    with pytest.raises(RecordError, match=said):
        models.load(saved, other, TARGET)


def test_another_target_is_refused(saved: Path) -> None:
    other = codegen.make_target({"kind": "cuda", "arch": "sm_100a"})
    with pytest.raises(RecordError, match="not for this target"):
        models.load(saved, hopper.TEMPLATE, other)


def test_what_is_no_model_is_refused(saved: Path) -> None:
    text = saved.read_text()
    other = json.loads(text)
    del other["learner"]["attributes"]["tvmcap"]
    for garbage in ("", "{}", "[1]", "nonsense", text[: len(text) // 2], json.dumps(other)):
        saved.write_text(garbage)
        with pytest.raises(RecordError, match="no cost model"):
            models.load(saved, hopper.TEMPLATE, TARGET)


def test_any_damage_to_a_model_is_refused_and_ends_no_process(model, saved: Path) -> None:
    """XGBoost itself aborts on much of it."""
    good, rng = saved.read_bytes(), np.random.default_rng()
    for i in range(16):
        at = int(rng.integers(len(good) - 2))
        changed = bytearray(good)
        changed[at] ^= 1 << int(rng.integers(7))
        saved.write_bytes(good[:at] if i % 2 else bytes(changed))
        try:
            back = models.load(saved, hopper.TEMPLATE, TARGET)
        except RecordError as e:
            assert len(str(e)) < 1000
        else:  # in what is said of the model, not in the model
            np.testing.assert_array_equal(margins(back), margins(model))
    data = json.loads(good)
    data["version"] = "moon"
    saved.write_text(json.dumps(data))
    with pytest.raises(RecordError, match="no cost model") as error:
        models.load(saved, hopper.TEMPLATE, TARGET)
    assert len(str(error.value)) < 1000


def test_nothing_learnt_is_nothing_to_save(tmp_path: Path) -> None:
    empty = models.train([], hopper.TEMPLATE, TARGET)
    with pytest.raises(RecordError, match="learnt nothing"):
        models.save(empty, tmp_path, "hopper_gemm", TARGET)
    prior = np.array(hopper.estimate(UNSEEN, KNOBS, TARGET))
    assert np.argmax(margins(empty)) == np.argmin(prior)  # the estimate ranks


def test_a_folder_that_cannot_be_written_is_an_error(model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="not saved"):
        models.save(model, tmp_path / "file", "hopper_gemm", TARGET)


def test_a_full_disk_keeps_the_model_that_was_there(
    model, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()
    write = Path.write_text

    def fill(self: Path, text: str) -> int:
        write(self, text[:1000])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(RecordError, match="No space left"):
        models.save(model, saved.parent, "hopper_gemm", TARGET)
    assert saved.read_bytes() == before and len(list(saved.parent.iterdir())) == 1


def stores_of(*folders: Path) -> Stores:
    found = tuple(RecordStore(folder) for folder in folders)
    return Stores(found, found[0])


def test_a_run_retrains_where_the_features_differ(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = json.loads(saved.read_text())
    about = json.loads(data["learner"]["attributes"]["tvmcap"])
    about["features"][0] = "moon"
    data["learner"]["attributes"]["tvmcap"] = json.dumps(about)
    saved.write_text(json.dumps(data))
    stores = stores_of(saved.parent)
    stores.append(records(count=10))
    with caplog.at_level(logging.WARNING, "tvmcap"):
        model = models.ready(stores, hopper.TEMPLATE, TARGET)
    assert "without log_rows and with moon" in caplog.text
    assert model.pretrained == 100


def test_a_run_refines_the_saved_model_on_the_records_of_its_own(
    model, saved: Path, tmp_path: Path
) -> None:
    """Records beside the model taught it already; those of another folder turn a preference."""
    own = tmp_path / "own"
    stores = stores_of(own, saved.parent)
    plain = models.ready(stores, hopper.TEMPLATE, TARGET)
    np.testing.assert_array_equal(margins(plain), margins(model))
    turned = [
        record(UNSEEN, k, float(us) * (2.0 if k.group == 16 else 1.0))
        for k, us in zip(KNOBS, made_up_us(UNSEEN, KNOBS), strict=True)
    ]
    stores.append(turned)
    refined = models.ready(stores, hopper.TEMPLATE, TARGET)
    times = np.array([r.median_us for r in turned])
    assert right(margins(refined), times) > right(margins(model), times) + 0.05


def test_a_run_starts_from_the_model_of_another_machine_where_there_is_none_of_its_own(
    model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All records of this one refine it, also those beside it; a build does not take it."""
    there, here, cpu = (tmp_path / name for name in ("there", "here", "cpu"))
    models.save(model, there, "hopper_gemm", {**fingerprint(TARGET), "arch": "sm_100a"})
    stores = stores_of(there, here)
    with caplog.at_level(logging.INFO, "tvmcap"):
        start = models.ready(stores, hopper.TEMPLATE, TARGET)
    np.testing.assert_array_equal(margins(start), margins(model))
    assert "of another machine" in caplog.text and "not used" not in caplog.text
    assert models.find(stores, hopper.TEMPLATE, TARGET) is None
    assert "not for this target; it is not used" in caplog.text
    times = made_up_us(UNSEEN, KNOBS) * [2.0 if k.group == 16 else 1.0 for k in KNOBS]
    stores.append([record(UNSEEN, k, float(us)) for k, us in zip(KNOBS, times, strict=True)])
    refined = models.ready(stores, hopper.TEMPLATE, TARGET)
    assert right(margins(refined), times) > right(margins(model), times) + 0.05
    few = models.train(records(count=20), hopper.TEMPLATE, TARGET)
    models.save(few, here, "hopper_gemm", TARGET)
    assert models.ready(stores, hopper.TEMPLATE, TARGET).pretrained == few.pretrained
    models.save(model, cpu, "hopper_gemm", {**fingerprint(TARGET), "kind": "llvm"})
    assert models.ready(stores_of(cpu), hopper.TEMPLATE, TARGET).base is None


def test_few_records_of_another_target_suffice_with_a_source() -> None:
    """On the other target columns are the better way to divide work."""
    source = dataset.of_template(records(count=40), hopper.TEMPLATE, TARGET)

    def there(sizes, knobs):
        return made_up_us(sizes, knobs) * [0.5 if k.groups == "columns" else 1.0 for k in knobs]

    own = []
    for k, n in SHAPES[:2]:
        sizes, points = Sizes(512, n, k), KNOBS[::5]
        times = there(sizes, points)
        own += [record(sizes, p, float(us)) for p, us in zip(points, times, strict=True)]
    few = dataset.of_template(own, hopper.TEMPLATE, TARGET)
    times = there(UNSEEN, KNOBS)
    rows = hopper.features(UNSEEN, KNOBS, TARGET)
    both = models.transfer(source, few, hopper.FEATURES)
    alone = models.train(records(count=40), hopper.TEMPLATE, TARGET)
    assert right(both.margins(rows), times) > right(alone.margins(rows), times)
