"""What the ladder's measurements say: rows for the result file, and a table for the terminal."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import timed
from gemm_common import changed

from tvmcap.base.timing import summarize

Row = dict[str, Any]


def pooled(measured: Row) -> dict[str, list[float]]:
    """Return the samples of each baseline, those of all its turns together."""
    return {name: [t for turn in turns for t in turn] for name, turns in measured["us"].items()}


def vendor(measured: Row) -> float | None:
    """Return the median of cuBLASLt's fused epilogue in its better layout; None without one."""
    found = [statistics.median(v) for k, v in pooled(measured).items() if "cublaslt" in k]
    return min(found, default=None)


def ladder_json(shapes: Mapping[Any, Row], candidates: Sequence[Row]) -> dict[str, Any]:
    """Return rows (the best setting of each shape and rung, with samples) and every candidate."""
    rows = []
    for shape, measured in shapes.items():
        base = {name: summarize(us) for name, us in pooled(measured).items()}
        fused = vendor(measured)
        for rung, best in best_of_rungs(shape, candidates).items():
            ours = summarize(best["us"])
            rows.append(
                {
                    "rung": rung,
                    "M": shape.m,
                    "K": shape.k,
                    "N": shape.n,
                    "knobs": dataclasses.asdict(best["knobs"]),
                    "settings": sum(
                        c["shape"] == shape and c["rung"] == rung and "us" in c for c in candidates
                    ),
                    "us": round(ours.median, 3),
                    "ratio_to_cublaslt": fused and round(fused / ours.median, 4),
                    "speedup_vs_best": round(min(b.median for b in base.values()) / ours.median, 4)
                    if base
                    else None,
                    "error": best["error"],
                    "ours_us": timed(ours),
                    "baselines_us": {name: timed(b) for name, b in base.items()},
                }
            )
    return {
        "rows": rows,
        "baselines": {
            str(shape): {
                "errors": m.get("errors"),
                "turns_us": {
                    k: [round(statistics.median(t), 3) for t in v] for k, v in m["us"].items()
                },
            }
            for shape, m in shapes.items()
        },
        "candidates": [_candidate(c) for c in candidates],
    }


def _candidate(row: Row) -> Row:
    data = {
        "shape": str(row["shape"]),
        "rung": row["rung"],
        "knobs": dataclasses.asdict(row["knobs"]),
    }
    if "us" not in row:
        return {**data, "cause": row["cause"], "message": row["message"][:300]}
    found = summarize(row["us"])
    times = {"us": found.median, "p10": found.p10, "p90": found.p90}
    return {**data, **{k: round(v, 3) for k, v in times.items()}, "samples": len(row["us"])}


def best_of_rungs(shape: Any, candidates: Sequence[Row]) -> dict[str, Row]:
    """Return the fastest candidate of each rung at a shape, rungs in order of appearance."""
    best: dict[str, Row] = {}
    for row in candidates:
        if row["shape"] != shape or "us" not in row:
            continue
        old = best.get(row["rung"])
        if old is None or statistics.median(row["us"]) < statistics.median(old["us"]):
            best[row["rung"]] = row
    return best


def shape_line(shape: Any, measured: Row, best: Sequence[Row]) -> str:
    """Render one shape: the vendor's time, and the three best settings."""
    base = vendor(measured)
    parts = [f"{shape}: cuBLASLt {base:.2f} us" if base else f"{shape}: no baseline"]
    for row in best[:3]:
        us = statistics.median(row["us"])
        ratio = f" ({base / us:.3f}x)" if base else ""
        parts.append(f"  {us:.2f} us{ratio} {row['rung']} {changed(row['knobs'])}")
    return "\n".join(parts)


def rung_table(shapes: Mapping[Any, Row], candidates: Sequence[Row]) -> str:
    """Render a table: for each rung its best ratio to cuBLASLt at each shape, and the failures."""
    rungs = list(dict.fromkeys(c["rung"] for c in candidates))
    bests = {shape: best_of_rungs(shape, candidates) for shape in shapes}
    width = max([len(r) for r in rungs] + [14])
    lines = [f"{'shape':>18} {'cuBLASLt us':>11} " + " ".join(f"{r:>{width}}" for r in rungs)]
    ratios: dict[str, list[float]] = {r: [] for r in rungs}
    for shape, measured in shapes.items():
        base, cells = vendor(measured), []
        for rung in rungs:
            row = bests[shape].get(rung)
            if row is None or base is None:
                cells.append("-")
                continue
            us = statistics.median(row["us"])
            ratios[rung].append(base / us)
            cells.append(f"{us:.1f} {base / us:.3f}x")
        head = f"{shape!s:>18} {base if base is None else round(base, 2)!s:>11} "
        lines.append(head + " ".join(f"{c:>{width}}" for c in cells))
    means = [f"{statistics.geometric_mean(v):.3f}x" if v else "-" for v in ratios.values()]
    lines.append(f"{'geometric mean':>18} {'':>11} " + " ".join(f"{c:>{width}}" for c in means))
    causes = [
        f"{rung}: {sum(c['rung'] == rung and c.get('cause') == cause for c in candidates)} {cause}"
        for rung in rungs
        for cause in dict.fromkeys(c["cause"] for c in candidates if "cause" in c)
        if any(c["rung"] == rung and c.get("cause") == cause for c in candidates)
    ]
    return "\n".join([*lines, *causes])
