"""The tuning records that ship: whole, small, and for the templates as they are now."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from tvmcap.base.codegen import make_target
from tvmcap.kernel import models
from tvmcap.kernel.dataset import data_hash
from tvmcap.kernel.fingerprint import tvm_version
from tvmcap.kernel.loop_features import LOOP_NESTS
from tvmcap.kernel.records import FILE_NAME, Record, RecordStore
from tvmcap.kernel.template import source_hash
from tvmcap.schedules import TEMPLATES

FOLDER = Path(__file__).parents[2] / "tuning_logs"
MODELS = sorted(FOLDER.glob("*/*.model.json"))
STORES = [RecordStore(path.parent) for path in sorted(FOLDER.glob("*/records.jsonl"))]
REFRESH = (
    "a template's source has changed since its records were measured, so build no longer uses "
    "them: on the GPU of the records measure again with benchmarks/cost_model_data.py and "
    "tune_suite.py, which picks what ships"
)


@pytest.mark.parametrize("store", STORES, ids=lambda s: s.folder.name)
def test_shipped_records_are_whole_and_small(store: RecordStore) -> None:
    assert store.bad_lines == 0 and store.records
    assert store.path.stat().st_size < 8_000_000
    for record in store.records:
        assert record.target["kind"] == store.folder.name
        assert record.error is None and record.median_us is not None and record.median_us > 0
        assert record.p10_us is not None and record.p90_us is not None and record.samples >= 3


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.name)
def test_shipped_models_are_of_the_shipped_records(path: Path, tmp_path: Path) -> None:
    """Whole, for today's features, and learnt from what stands beside them, or is packed."""
    kinds = {kind.name: kind for kind in (*TEMPLATES, LOOP_NESTS)}
    kind = kinds[path.name.removesuffix(models.SUFFIX)]
    store = RecordStore(path.parent)
    if not store.records:
        packed = FOLDER.parent / "benchmarks" / "records" / path.parent.name / f"{FILE_NAME}.gz"
        (tmp_path / FILE_NAME).write_bytes(gzip.decompress(packed.read_bytes()))
        store = RecordStore(tmp_path)
    assert store.bad_lines == 0 and {r.tvm for r in store.records} == {tvm_version()}
    where = store.records[0].target
    records = [r for r in store.records if r.target == where]
    target = target_of(records[0])
    model = models.load(path, kind, target)
    assert model.source == data_hash(models.groups(records, kind, target))


def target_of(record: Record) -> Any:
    """Return the target that a record was measured on."""
    kind, arch = record.target["kind"], record.target["arch"]
    if kind == "cuda":
        return make_target({"kind": kind, "arch": arch})
    features = {"mattr": record.target["features"]} if record.target["features"] else {}
    return make_target(
        {"kind": kind, "mcpu": arch, "num-cores": record.target["cores"], **features}
    )


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
