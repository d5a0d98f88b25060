"""The tuning records that ship: whole, small, and for the templates as they are now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmcap.kernel.fingerprint import tvm_version
from tvmcap.kernel.records import RecordStore
from tvmcap.kernel.template import source_hash
from tvmcap.schedules import TEMPLATES

FOLDER = Path(__file__).parents[2] / "tuning_logs"
STORES = [RecordStore(path.parent) for path in sorted(FOLDER.glob("*/records.jsonl"))]
REFRESH = (
    "a template's source has changed since its records were measured, so build no longer uses "
    "them: on the GPU of the records run benchmarks/tune_suite.py capture, tune and compact"
)


@pytest.mark.parametrize("store", STORES, ids=lambda s: s.folder.name)
def test_shipped_records_are_whole_and_small(store: RecordStore) -> None:
    assert store.bad_lines == 0 and store.records
    assert store.path.stat().st_size < 2_000_000
    for record in store.records:
        assert record.target["kind"] == store.folder.name
        assert record.error is None and record.median_us is not None and record.median_us > 0
        assert record.p10_us is not None and record.p90_us is not None and record.samples >= 3


@pytest.mark.parametrize("store", STORES, ids=lambda s: s.folder.name)
def test_shipped_records_are_of_todays_templates(store: RecordStore) -> None:
    templates = {template.name: template for template in TEMPLATES}
    hashes = {name: source_hash(template) for name, template in templates.items()}
    for record in store.records:
        assert record.tvm == tvm_version()
        if record.template is not None:
            assert record.template_hash == hashes[record.template], REFRESH
            knobs = templates[record.template].knobs_from_json(record.candidate)
            assert templates[record.template].knobs_to_json(knobs) == record.candidate
            width = len(templates[record.template].feature_names)
            assert record.features is None or len(record.features) == width
