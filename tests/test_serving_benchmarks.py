"""The load that serving is measured with, and the soak, in short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import serving_client  # noqa: E402
import serving_tables  # noqa: E402
import soak  # noqa: E402


def run(script, *options):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options], capture_output=True, text=True
    )


def test_the_benchmark_in_short(tmp_path):
    path = tmp_path / "serving.json"
    done = run(
        "serving.py",
        *f"--json {path} --hidden 64 --clients 6 --rounds 1 --seconds 0.5 --warm-s 0.2".split(),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    data = json.loads(path.read_text())
    batching, single = data["rows"]
    assert single["batch_rows"] == 1 and 1 < batching["batch_rows"] <= 6
    for row in data["rows"]:
        assert row["latency_us"]["p99"] >= row["latency_us"]["median"] > 0
        assert row["requests_per_s"]["samples"] and row["compute_p99_us"] >= row["compute_p50_us"]
    head, body = serving_tables.table(data["rows"])
    assert all(len(line) == len(head) for line in body) and body[1][4] == "1.0x"


def test_the_soak_for_eight_seconds():
    done = run("soak.py", *"--seconds 8 --clients 3 --swap-every 2".split())
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["killed"] >= 4 and report["swaps"] >= 2 and report["answered"] > 100


def report(**last):
    steady = {"rss_mb": 100.0, "fds": 20, "threads": 5}
    samples = [dict(steady) for _ in range(12)] + [{**steady, **last} for _ in range(4)]
    return {"failures": [], "samples": samples}


def test_what_the_soak_calls_wrong():
    fine = {'tvmcap_requests_total{status="200"}': 9.0, 'tvmcap_requests_total{status="499"}': 1.0}
    assert soak.judge(report(), fine) == []
    for last in ({"rss_mb": 130.0}, {"fds": 40}, {"threads": 9}):
        (wrong,) = soak.judge(report(**last), fine)
        assert f"{next(iter(last))} grew" in wrong
    assert soak.judge({**report(), "failures": [["status 500"]]}, fine)
    assert soak.judge(report(), {**fine, 'tvmcap_requests_total{status="500"}': 2.0})


def test_quantiles_are_read_off_a_histogram():
    edges = (("0.1", 10.0), ("0.2", 90.0), ("+Inf", 100.0))
    figures = {f'tvmcap_t_bucket{{le="{edge}"}}': count for edge, count in edges}
    assert serving_client.quantile(figures, "t", 0.05) == 0.05
    assert abs(serving_client.quantile(figures, "t", 0.5) - 0.15) < 1e-9
