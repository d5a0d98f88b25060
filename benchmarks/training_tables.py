"""Tables of the benchmark of training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
_BASELINES = {
    "three_matmuls": "three products",
    "eager": "eager",
    "torch_compile": "torch.compile",
}


def layers(us: Callable[[Any], str]) -> Callable[[Sequence[Row]], Table]:
    """One line a shape: times, and what each takes over the three products."""

    def make(rows: Sequence[Row]) -> Table:
        head = ["M", "K", "N", "library", "kernels", "tvmcap, us"]
        head += [f"{name}, us" for name in _BASELINES.values()]
        head += ["tvmcap over products", "eager over", "torch.compile over", "right"]
        body = []
        for r in (r for r in rows if r["kind"] == "layer"):
            size = [str(r[name]) for name in "MKN"]
            if "failed" in r:
                body.append([*size, f"failed: {_plain(r['failed'])}", *[""] * (len(head) - 4)])
                continue
            times = [us(r["baselines_us"].get(name)) for name in _BASELINES]
            over = [_x(r["over_matmuls"].get(n)) for n in ("ours", "eager", "torch_compile")]
            right = "yes" if r["right"] else "**no**"
            own = [r["case"], str(r["kernels"]), us(r["ours_us"])]
            body.append([*size, *own, *times, *over, right])
        return head, body

    return make


def budgets(us: Callable[[Any], str]) -> Callable[[Sequence[Row]], Table]:
    """One line a memory budget: what is saved, beside eager, and the time of a step."""

    def make(rows: Sequence[Row]) -> Table:
        head = ["model", "memory_budget", "saved", "of eager's", "planned peak", "tvmcap, us"]
        head += ["eager, us", "torch.compile, us"]
        body = []
        for r in (r for r in rows if r["kind"] == "budget"):
            if "failed" in r:
                why = f"failed: {_plain(r['failed'])}"
                body.append([why, f"{r['memory_budget']:g}", *[""] * (len(head) - 2)])
                continue
            ratio = f"{r['saved_bytes'] / r['eager_saved_bytes']:.2f}x"
            times = [us(r["baselines_us"].get(name)) for name in ("eager", "torch_compile")]
            saved = [_mib(r["saved_bytes"]), ratio, _mib(r["peak_bytes_planned"])]
            body.append([r["case"], f"{r['memory_budget']:g}", *saved, us(r["ours_us"]), *times])
        return head, body

    return make


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def _x(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f} MiB"
