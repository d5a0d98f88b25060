"""Records of made-up times of the Hopper GEMM, for tests of what is learnt from them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.schedules.products import TARGET
from tvmcap.kernel.fingerprint import fingerprint, tvm_version
from tvmcap.kernel.records import Record, digest
from tvmcap.kernel.template import source_hash
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules.hopper_columns import Columns, Sizes
from tvmcap.schedules.hopper_estimate import estimate_us

SHAPES = ((1024, 4096), (4096, 1024), (3072, 768), (2048, 2048), (512, 8192))
KNOBS = [
    hopper.Knobs(bm, bn, 64, 4, groups, group=group)
    for bm, bn, groups in hopper.TILES
    for group in (4, 8, 16)
]


SOURCE, MACHINE = source_hash(hopper.TEMPLATE), fingerprint(TARGET)


def made_up_us(sizes: Sizes, knobs: list[hopper.Knobs]) -> Any:
    """Return the estimate where columns of 16 bits and a group of 16 make kernels faster."""
    factor = [1.0 - 0.2 * (k.group == 16) + 0.3 * (k.groups == "columns") for k in knobs]
    return estimate_us(sizes, Columns.of(knobs)) * np.array(factor)


def record(sizes: Sizes, knobs: hopper.Knobs, us: float | None, **changes: Any) -> Record:
    """Return a measurement as a store holds it."""
    workload = {
        "op": "gemm",
        "n": sizes.n,
        "k": sizes.k,
        "batch": [],
        "dtypes": ["bfloat16"] * 3,
        "layout": ["mk", "nk"],
        "digest": f"{sizes.k}x{sizes.n}",
    }
    values: dict[str, Any] = {
        "kind": "template",
        "workload": workload,
        "workload_hash": digest(workload),
        "sizes": {"rows": sizes.rows},
        "template": "hopper_gemm",
        "template_hash": SOURCE,
        "knobs": dataclasses.asdict(knobs),
        "trace": None,
        "target": MACHINE,
        "tvm": tvm_version(),
        "median_us": us,
        "p10_us": us,
        "p90_us": us,
        "samples": 9,
        "error": None if us is not None else {"cause": "compile", "message": "no"},
        "seed": 0,
        "date": "",
    }
    return Record(**{**values, **changes})


def records(shapes: Any = SHAPES, rows: Any = (512, 2048), count: int = 20) -> list[Record]:
    """Return measurements of some settings at each shape."""
    found = []
    rng = np.random.default_rng(3)
    for k, n in shapes:
        for m in rows:
            sizes = Sizes(m, n, k)
            points = [KNOBS[i] for i in rng.permutation(len(KNOBS))[:count]]
            times = made_up_us(sizes, points)
            found += [record(sizes, p, float(us)) for p, us in zip(points, times, strict=True)]
    return found
