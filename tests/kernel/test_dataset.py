"""Records become groups of candidates: features from what they hold, each candidate once."""

from __future__ import annotations

import dataclasses

import fake_template as fake
import numpy as np

from tests.kernel.model_cases import KNOBS, record, records
from tests.schedules.products import TARGET
from tvmcap.kernel import dataset
from tvmcap.kernel.template import source_hash
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules.hopper_columns import Sizes

SIZES = Sizes(512, 4096, 1024)


def of(found, **options):
    return dataset.of_template(found, hopper.TEMPLATE, TARGET, **options)


def test_a_group_for_each_task_and_size() -> None:
    groups = of(records())
    assert len(groups) == 10 and len({g.name for g in groups}) == 10
    for g in groups:
        sizes = Sizes(g.sizes["rows"], g.workload["n"], g.workload["k"])
        np.testing.assert_array_equal(g.rows, hopper.features(sizes, g.knobs, TARGET))
        assert g.estimates_us == tuple(hopper.estimate(sizes, g.knobs, TARGET))
    assert groups == sorted(groups, key=lambda g: g.name)


def test_of_two_timings_the_later_counts_and_failures_stay() -> None:
    (group,) = of(
        [record(SIZES, k, us) for k, us in zip(KNOBS[:2] * 2, (3.0, 4.0, 5.0, None), strict=True)]
    )
    assert group.times_us == (5.0, None)


def test_the_order_of_the_store_does_not_matter() -> None:
    found = records()
    for one, other in zip(of(found), of(found[::-1]), strict=True):
        assert one.knobs == other.knobs and one.times_us == other.times_us
        np.testing.assert_array_equal(one.rows, other.rows)


def test_other_sources_only_where_they_are_asked_for() -> None:
    old = [record(SIZES, k, 2.0, template_hash="earlier") for k in KNOBS[:3]]
    assert of(old) == [] and len(of(old, any_source=True)[0].rows) == 3


def test_knobs_of_before_keep_their_default_and_unknown_ones_are_left_out() -> None:
    plain = dataclasses.asdict(KNOBS[0])
    without = {name: value for name, value in plain.items() if name != "persistent"}
    known, unknown = (
        dataclasses.replace(record(SIZES, KNOBS[0], 2.0), knobs=knobs)
        for knobs in (without, {**plain, "wings": 2})
    )
    (group,) = of([known, unknown])
    assert group.knobs == (KNOBS[0],)
    assert of([unknown]) == []


def test_an_extent_that_the_record_leaves_open_is_left_out() -> None:
    open_ = record(SIZES, KNOBS[0], 2.0)
    workload = {**open_.workload, "n": "n"}
    assert of([dataclasses.replace(open_, workload=workload)]) == []


def test_without_recall_the_features_of_the_record_count() -> None:
    known = record(SIZES, KNOBS[0], 2.0, template="fake", template_hash=source_hash(fake.FAKE))
    whole = dataclasses.replace(known, features=[4.0, 0.0, 16.0])
    short = dataclasses.replace(known, features=[4.0], knobs={"tile": 8})
    (group,) = dataset.of_template([whole, short], fake.FAKE, fake.target())
    assert group.rows.tolist() == [[4.0, 0.0, 16.0]] and group.times_us == (2.0,)
    assert dataset.of_template([short], fake.FAKE, fake.target()) == []


def test_the_hash_is_of_the_measurements_in_any_order() -> None:
    found = records()
    mixed = [found[i] for i in np.random.default_rng(0).permutation(len(found))]
    assert dataset.data_hash(of(found)) == dataset.data_hash(of(mixed))
    changed = [*found[1:], dataclasses.replace(found[0], median_us=1.0)]
    assert dataset.data_hash(of(found)) != dataset.data_hash(of(changed))
