"""Tables of the GEMM suite and the ladder, and the figures that the suite comes to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]

MIB = 1 << 20


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    """Return the rows of one kind that were measured."""
    return [r for r in rows if r["kind"] == kind and "failed" not in r]


def summary(rows: Sequence[Row]) -> Row:
    """Return the figures that the suite's rows come to; None where nothing was measured."""
    gemms, norms, fresh = (of_kind(rows, kind) for kind in ("gemm", "row", "never tuned"))
    few = [r for r in gemms if r["M"] <= 32]
    named = {(r["M"], r["K"], r["N"]): r for r in gemms}
    block = named.get((2048, 1024, 4096), {})

    def least(values: Sequence[float | None]) -> float | None:
        return min((v for v in values if v is not None), default=None)

    return {
        "shapes": len(gemms),
        "failed": sum("failed" in r for r in rows),
        "with_every_baseline": sum(bool(r["complete"]) for r in gemms),
        "mean_vs_best": _mean([r["speedup_vs_best"] for r in gemms]),
        "mean_vs_best_from_256_rows": _mean([r["speedup_vs_best"] for r in gemms if r["M"] >= 256]),
        "least_vs_best": least([r["speedup_vs_best"] for r in gemms]),
        "block_vs_cublaslt": block.get("ratio_to_cublaslt"),
        "cube_of_8192_vs_best": named.get((8192, 8192, 8192), {}).get("speedup_vs_best"),
        "least_read_share_of_32_mib_weights": least(
            [r["read_share"] for r in few if 2 * r["K"] * r["N"] >= 32 * MIB]
        ),
        "least_vs_cublaslt_of_8_mib_weights": least(
            [r.get("ratio_to_cublaslt") for r in few if 2 * r["K"] * r["N"] <= 8 * MIB]
        ),
        "least_vs_tuned_at_sizes_never_tuned": least([r["ratio_to_tuned"] for r in fresh]),
        "least_share_of_copy_bandwidth": least([r["copy_share"] for r in norms]),
        "least_row_template_vs_torch_compile": least([r["ratio_to_torch_compile"] for r in norms]),
    }


_LABELS = {
    "shapes": "shapes measured",
    "failed": "rows that failed",
    "with_every_baseline": "shapes with every baseline",
    "mean_vs_best": "geometric mean over the best baseline",
    "mean_vs_best_from_256_rows": "the same, M of 256 and more",
    "least_vs_best": "worst shape over its best baseline",
    "block_vs_cublaslt": "2048 x 1024 x 4096 over cuBLASLt's fused epilogue",
    "cube_of_8192_vs_best": "8192 x 8192 x 8192 over the best baseline",
    "least_read_share_of_32_mib_weights": "M up to 32, w of 32 MiB or more: least share of read "
    "bandwidth",
    "least_vs_cublaslt_of_8_mib_weights": "M up to 32, w of 8 MiB: least over cuBLASLt",
    "least_vs_tuned_at_sizes_never_tuned": "M never tuned: least over a tuning at that M",
    "least_share_of_copy_bandwidth": "row template: least share of copy bandwidth",
    "least_row_template_vs_torch_compile": "row template: least over torch.compile",
}
_COUNTS = ("shapes", "failed", "with_every_baseline")


def summary_table(rows: Sequence[Row]) -> Table:
    """One line a figure."""
    found = summary(rows)
    body = [[_LABELS[k], "-" if v is None else _figure(k, v)] for k, v in found.items()]
    return ["figure", "measured"], body


def _figure(name: str, value: float) -> str:
    if name in _COUNTS:
        return str(value)
    return f"{value:.0%}" if "share" in name else f"{value:.2f}x"


def suite_table(us: Callable[[Any], str]) -> Callable[[Sequence[Row]], Table]:
    """One line a shape: ours, each baseline, the ratio to the best."""
    named = {
        "cublaslt_epilogue": "cuBLASLt epilogue, us",
        "linear_gelu": "linear + gelu, us",
        "torch_compile_max_autotune": "torch.compile, us",
    }

    def make(rows: Sequence[Row]) -> Table:
        head = ["M", "K", "N", "tvmcap, us", *named.values()]
        head += ["over cuBLASLt", "over the best", "TFLOP/s", "share of read bandwidth"]
        body = []
        for r in rows:
            if r["kind"] != "gemm":
                continue
            size = [str(r[name]) for name in "MKN"]
            if "failed" in r:
                body.append([*size, f"failed: {_cell(r['failed'])}", *[""] * 7])
                continue
            times = [us(r["ours_us"]), *(us(r["baselines_us"].get(name)) for name in named)]
            ratios = [_x(r.get("ratio_to_cublaslt")), _x(r["speedup_vs_best"])]
            share = f"{r['read_share']:.0%}" if r["M"] <= 64 else ""
            body.append([*size, *times, *ratios, f"{r['tflops']:.0f}", share])
        return head, body

    return make


def row_table(us: Callable[[Any], str]) -> Callable[[Sequence[Row]], Table]:
    """One line a case of the row template."""

    def make(rows: Sequence[Row]) -> Table:
        head = ["8192 x 4096", "kernels", "tvmcap, us", "eager, us", "torch.compile, us"]
        head += ["over torch.compile", "share of copy bandwidth"]
        body = []
        for r in of_kind(rows, "row"):
            base = r["baselines_us"]
            times = [us(r["ours_us"]), us(base.get("eager"))]
            times.append(us(base.get("torch_compile_max_autotune")))
            share = f"{r['copy_share']:.0%}"
            body.append(
                [r["case"], str(r["kernels"]), *times, _x(r["ratio_to_torch_compile"]), share]
            )
        return head, body

    return make


def never_tuned_table(us: Callable[[Any], str]) -> Callable[[Sequence[Row]], Table]:
    """One line a size that no record is for."""

    def make(rows: Sequence[Row]) -> Table:
        head = ["M", "K", "N", "library, us", "tuned at this M, us", "over the tuned"]
        body = [
            [*(str(r[name]) for name in "MKN"), us(r["ours_us"]), us(r["tuned_us"]),
             _x(r["ratio_to_tuned"])]
            for r in of_kind(rows, "never tuned")
        ]  # fmt: skip
        return head, body

    return make


def ladder_table(rows: Sequence[Row]) -> Table:
    """One line a rung, in order: its ratio to cuBLASLt at each shape, best of its settings."""
    rungs = list(dict.fromkeys(r["rung"] for r in rows))
    shapes = list(dict.fromkeys((r["M"], r["K"], r["N"]) for r in rows))
    found = {(r["rung"], (r["M"], r["K"], r["N"])): r["ratio_to_cublaslt"] for r in rows}
    head = ["rung", *(" x ".join(map(str, shape)) for shape in shapes), "geometric mean"]
    body = []
    for rung in rungs:
        ratios = [found.get((rung, shape)) for shape in shapes]
        known = [r for r in ratios if r is not None]
        body.append([rung, *(_x(r) for r in ratios), _x(_mean(known))])
    return head, body


def traffic_table(rows: Sequence[Row]) -> Table:
    """One line a shape: bytes of HBM as counted and as profiled."""
    head = ["M", "K", "N", "kernels", "reads counted, MB", "reads profiled, MB", "ratio"]
    head += ["writes counted, MB", "writes profiled, MB"]
    body = []
    for r in rows:
        read, written = (
            [f"{r[f'{side}_{what}_bytes'] / 1e6:.1f}" for side in ("counted", "profiled")]
            for what in ("read", "written")
        )
        size = [str(r[name]) for name in "MKN"]
        body.append([*size, str(r["kernels"]), *read, _x(r["read_ratio"]), *written])
    return head, body


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.geometric_mean(values), 4) if values else None


def _x(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
