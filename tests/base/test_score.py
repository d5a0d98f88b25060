"""Score: its JSON and its text."""

import json

from tvmcap.base.score import KernelScore, Latency, Score

SCORE = Score(
    sizes={"B": 16},
    kernels=1,
    hbm_bytes=1234567,
    activation_traffic=2.5,
    weight_bytes=64,
    peak_bytes_planned=4096,
    latency_us=Latency(50.0, 45.0, 60.0, (45.0, 50.0, 60.0)),
    eager_us=Latency(75.0, 70.0, 80.0),
    speedup=1.5,
    tuned_tasks=1,
    tasks=2,
    verified=True,
    eager_kernels=3,
    per_kernel=(KernelScore("matmul", 10, 20, "template:cpu_gemm"),),
)


def test_json_round_trip():
    assert Score.from_json(json.loads(json.dumps({**SCORE.to_json(), "later": 1}))) == SCORE


def test_text_holds_the_figures_and_dashes_for_what_was_not_measured():
    lines = {line[:22].strip(): line[22:].split() for line in str(SCORE).splitlines()[1:-1]}
    assert lines["kernels"] == ["1", "3"]
    assert lines["HBM bytes"] == ["1,234,567", "-"]
    assert lines["median us a call"] == ["50.0", "75.0", "-"]
    assert lines["time over tvmcap's"] == ["1.00", "1.50", "-"]
    assert str(SCORE).splitlines()[0].startswith("B=16")
    assert str(SCORE).endswith("1 of 2 tasks tuned; verified")
    assert "not verified yet" in str(Score({}, None, None, None, None, None))
