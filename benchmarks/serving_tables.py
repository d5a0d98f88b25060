"""The table of the serving benchmark."""

from __future__ import annotations

from typing import Any


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """One line a server.

    A request that comes while a batch runs waits for that batch, and is answered with its own: the
    bound is the set delay and two batches' compute, at its 99th percentile.
    """
    head = ["server", "clients", "rows a batch", "requests a second", "over max batch 1"]
    head += ["request, median ms", "p99 ms", "set delay, ms", "batch compute, p99 ms"]
    head += ["delay and two batches, ms"]
    return head, [_line(row) for row in rows]


def _line(row: dict[str, Any]) -> list[str]:
    rate, latency = row["requests_per_s"], row["latency_us"]
    compute_ms = row["compute_p99_us"] / 1e3
    bound = row["max_delay_ms"] + 2 * compute_ms
    return [
        row["case"],
        str(row["clients"]),
        f"{row['batch_rows']:.1f}",
        f"{rate['median']:.0f} ({rate['p10']:.0f} to {rate['p90']:.0f})",
        f"{row['speedup_over_batch_1']:.1f}x",
        f"{latency['median'] / 1e3:.1f}",
        f"{latency['p99'] / 1e3:.1f}",
        f"{row['max_delay_ms']:g}",
        f"{compute_ms:.1f}",
        f"{bound:.1f}" if row["max_batch"] > 1 else "-",
    ]
