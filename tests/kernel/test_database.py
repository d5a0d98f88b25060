"""Records to MetaSchedule's databases and back."""

from __future__ import annotations

from pathlib import Path

import fake_template as fake
import pytest
from test_records import record

from tvmcap.kernel import database, tasks


@pytest.mark.parametrize("kind", ["memory", "json"])
def test_to_and_from_metaschedule(tmp_path: Path, kind: str) -> None:
    from tvm.s_tir import meta_schedule as ms

    (task,) = tasks.extract(fake.module(), fake.target(), fake.find)
    key = task.key
    made = [
        record(
            tile,
            us,
            workload=task.workload,
            workload_hash=key.workload_hash,
            template_hash=key.template_hash,
        )
        for tile, us in ((4, 5.0), (8, 3.0), (16, None))
    ]
    target = fake.target()
    folder = str(tmp_path)
    db = ms.database.MemoryDatabase()
    if kind == "json":
        db = ms.database.JSONDatabase(work_dir=folder)
    db = database.to_database(made, [task], target, db)
    if kind == "json":
        db = ms.database.JSONDatabase(work_dir=folder)
    back = database.from_database(db, [task], target)
    times = {r.candidate: r.median_us for r in back}
    assert times == pytest.approx({r.candidate: r.median_us for r in made if r.error is None})
    assert all(r.key == key and r.sizes == {"rows": 16} for r in back)
