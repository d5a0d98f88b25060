"""Tables of the 8-bit benchmark, and the figures that it comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gemm_tables import of_kind

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]

_COLUMNS = {
    "bf16": "tvmcap bf16",
    "torch_compile_int8": "torch.compile int8",
    "scaled_mm": "_scaled_mm",
    "scaled_mm_rowwise": "_scaled_mm, row scales",
    "quantized_scaled_mm": "quantize and _scaled_mm",
}
_CUBE = (8192, 8192, 8192)


def summary(rows: Sequence[Row]) -> Row:
    """Return the figures that the rows come to; None where nothing was measured."""
    found = of_kind(rows, "8 bits")
    named = {(r["scheme"], r["M"], r["K"], r["N"]): r for r in found}
    cube = named.get(("int8", *_CUBE), {})

    def least(scheme: str, other: str) -> float | None:
        ratios = (r["ratios"].get(other) for r in found if r["scheme"] == scheme)
        return min((v for v in ratios if v is not None), default=None)

    return {
        "rows": len(found),
        "failed": sum("failed" in r for r in rows),
        "int8_least_vs_bf16": least("int8", "bf16"),
        "int8_vs_bf16_at_2048x4096x4096": named.get(("int8", 2048, 4096, 4096), {})
        .get("ratios", {})
        .get("bf16"),
        "int8_vs_bf16_at_8192_cubed": cube.get("ratios", {}).get("bf16"),
        "int8_least_vs_torch_compile": least("int8", "torch_compile_int8"),
        "int8_tops_alone_at_8192_cubed": cube.get("tops_alone"),
        "e4m3_least_vs_bf16": least("e4m3", "bf16"),
        "e4m3_least_vs_scaled_mm": least("e4m3", "scaled_mm"),
        "e4m3_least_vs_quantized_scaled_mm": least("e4m3", "quantized_scaled_mm"),
        "e4m3_alone_least_vs_scaled_mm": min(
            (round(v, 4) for r in found if "failed" not in r and (v := _alone(r))), default=None
        ),
    }


def table(us: Callable[[Any], str]) -> Callable[[Sequence[Row]], Table]:
    """One line a shape and scheme: ours, its product alone, what others take, the ratios."""

    def make(rows: Sequence[Row]) -> Table:
        head = ["M", "K", "N", "scheme", "tvmcap, us", "product alone, us", "TOPS alone"]
        head += [f"{label}, us" for label in _COLUMNS.values()]
        head += [f"over {label}" for label in _COLUMNS.values()]
        head += ["alone over _scaled_mm", "SQNR, dB"]
        body = []
        for r in rows:
            size = [*(str(r[name]) for name in "MKN"), r["scheme"]]
            if "failed" in r:
                why = r["failed"].replace("|", "/").replace("\n", " ")
                body.append([*size, f"failed: {why}", *[""] * (len(head) - len(size) - 1)])
                continue
            own = [us(r["ours_us"]), us(r["kernel_us"]), f"{r['tops_alone']:.0f}"]
            times = [us(r["baselines_us"].get(name)) for name in _COLUMNS]
            ratios = [_x(r["ratios"].get(name)) for name in _COLUMNS]
            body.append([*size, *own, *times, *ratios, _x(_alone(r)), f"{r['sqnr_db']:.1f}"])
        return head, body

    return make


def cpu_table(us: Callable[[Any], str]) -> Callable[[Sequence[Row]], Table]:
    """One line a batch size on a CPU: ours in int8 and float32, PyTorch's, the ratios."""
    others = ("ours float32", "torch int8", "torch float32")

    def make(rows: Sequence[Row]) -> Table:
        head = ["batch", "tvmcap int8, us", "tvmcap float32, us", "PyTorch int8, us"]
        head += ["PyTorch float32, us", "over tvmcap float32", "over PyTorch int8"]
        head += ["SQNR, dB", "PyTorch's, dB"]
        body = []
        for r in rows:
            times = [us(r["baselines_us"][name]) for name in others]
            ratios = [_x(r["speedup_vs_float32"]), _x(r["speedup_vs_torch_int8"])]
            noise = [f"{r['sqnr_db'][name]:.1f}" for name in ("ours", "torch int8")]
            body.append([str(r["M"]), us(r["ours_us"]), *times, *ratios, *noise])
        return head, body

    return make


def _alone(row: Row) -> float | None:
    """Return the time of PyTorch's e4m3 product over that of ours with its epilogue."""
    theirs = row["baselines_us"].get("scaled_mm")
    return theirs and theirs["median"] / row["kernel_us"]["median"]


def _x(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
