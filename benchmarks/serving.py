"""Dynamic batching on the CPU: the same server with batches and with max batch 1.

    python benchmarks/serving.py --json benchmarks/results/serving.json

An MLP 1024 -> 4096 -> 4096 -> 1024 in float32: 100 MB of weights, more than the last cache holds,
so that a single row costs their way from memory, and rows that run together share it. 64 clients
send one row each, and again as soon as they have the answer, so that requests never run dry.
Clients and server share the cores. The servers take turns, one round each.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import timed, write
from serving_client import infer_request, load, metrics, quantile, running
from serving_tables import table
from torch import nn

import tvmcap
from tvmcap.base.timing import summarize

WIDTH, HIDDEN = 1024, 4096
_KEPT = 500


def model(hidden: int) -> nn.Module:
    """Return the MLP with weights that are always the same."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, WIDTH)).eval()


@dataclass
class Work:
    """What the clients send, and what they should get.

    Attributes
    ----------
    library, argument: the library, and the name of its argument.
    rows: one row for each client; ``want`` is what PyTorch makes of it.
    """

    library: Path
    argument: str
    rows: np.ndarray
    want: np.ndarray


def make_work(folder: Path, hidden: int, clients: int) -> Work:
    """Build the library, draw a row for each client, and ask PyTorch."""
    dynamic = {0: {0: tvmcap.Dim("B", max=4096)}}
    options = {"target": "llvm", "dynamic": dynamic, "verify": False}  # answers are checked
    fn, rows = model(hidden), torch.randn(clients, WIDTH)
    lib = tvmcap.build(fn, (torch.randn(64, WIDTH),), **options)
    with torch.no_grad():
        want = fn(rows).numpy()
    argument = lib.signature.inputs[0].name
    return Work(lib.export(folder / "mlp.so"), argument, rows.numpy(), want)


@dataclass
class Round:
    """One round: requests a second, seconds of each request, and what the server counted."""

    throughput: float
    seconds: list[float]
    counted: dict[str, float]


def one_round(work: Work, served: list[str], warm_s: float, seconds: float) -> Round:
    """Serve, load, and check the last answer of each client."""
    with running(work.library, *served) as (url, _):
        requests = [infer_request(url, row[None], work.argument) for row in work.rows]
        asyncio.run(load(url, requests, warm_s))
        before = metrics(url)
        clients = asyncio.run(load(url, requests, seconds))
        counted = {k: v - before.get(k, 0.0) for k, v in metrics(url).items()}
    failed = [answer for client in clients for answer in client.failed]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0][:200]!r}")
    for want, client in zip(work.want, clients, strict=True):
        got = np.frombuffer(client.last[-want.nbytes :], np.float32)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    ends = np.sort([end for client in clients for end in client.ends])
    inside = int(((ends > ends[0]) & (ends <= ends[0] + seconds)).sum())
    return Round(inside / seconds, [s for client in clients for s in client.seconds], counted)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="result file")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--delay-ms", type=float, default=5.0, help="the batching server's delay")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each round")
    parser.add_argument("--warm-s", type=float, default=2.0, help="before each round")
    options = parser.parse_args()
    cases = {"batching": options.clients, "max batch 1": 1}
    rounds: dict[str, list[Round]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        work = make_work(Path(folder), options.hidden, options.clients)
        for _ in range(options.rounds):
            for case, batch in cases.items():
                served = ["--max-batch", str(batch), "--max-delay-ms", str(options.delay_ms)]
                rounds[case].append(one_round(work, served, options.warm_s, options.seconds))
    report = [row(case, batch, rounds[case], options) for case, batch in cases.items()]
    for line in report:
        line["speedup_over_batch_1"] = (
            line["requests_per_s"]["median"] / report[-1]["requests_per_s"]["median"]
        )
    head, body = table(report)
    for line in (head, *body):
        print(" | ".join(line))
    if options.json:
        write(options.json, report, folders=("runtime",), dtype="float32")


def row(case: str, batch: int, rounds: list[Round], options: Any) -> dict[str, Any]:
    """Return the row of one server: quantiles over the requests and batches of all rounds."""
    micros = np.sort([1e6 * s for one in rounds for s in one.seconds])
    kept = micros[np.linspace(0, len(micros) - 1, min(_KEPT, len(micros))).astype(int)]
    counted = {name: sum(one.counted[name] for one in rounds) for name in rounds[0].counted}
    compute = {
        f"compute_p{int(100 * share)}_us": 1e6 * quantile(counted, "compute_seconds", share)
        for share in (0.5, 0.99)
    }
    return {
        "case": case,
        "clients": options.clients,
        "max_batch": batch,
        "max_delay_ms": options.delay_ms,
        "hidden": options.hidden,
        "batch_rows": counted["tvmcap_batch_rows_sum"] / counted["tvmcap_batch_rows_count"],
        "requests_per_s": timed(summarize([one.throughput for one in rounds])),
        "latency_us": {**timed(summarize(list(kept))), "p99": float(np.quantile(micros, 0.99))},
        **compute,
    }


if __name__ == "__main__":
    main()
