"""What every benchmark writes: raw samples, and where, when and with what they were taken."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvmcap.base.score import Latency
from tvmcap.versions import COMPILER, source_hash, versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def meta(folders: tuple[str, ...] = COMPILER, **more: Any) -> dict[str, Any]:
    """Describe the machine, the software, the commit and the command of this run.

    ``folders`` of the package hold what is measured; a change there makes the result stale. What
    only PyTorch knows is null on a host without it.
    """
    try:
        import torch
    except ImportError:
        torch = None

    card = torch.cuda.get_device_name(0) if torch and torch.cuda.is_available() else None
    return {
        "card": card,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads() if torch else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if card
        else None,
        "python": platform.python_version(),
        "versions": {**versions(), "torch": torch.__version__ if torch else None},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "folders": list(folders),
        "source": source_hash(folders),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **more,
    }


def timed(latency: Latency) -> dict[str, Any]:
    """Return median, p10, p90 and the samples, rounded to a nanosecond."""
    data = asdict(latency)
    return {k: [round(s, 3) for s in v] if k == "samples" else round(v, 3) for k, v in data.items()}


def write(path: str | Path, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write ``{"meta": ..., "rows": ...}`` as JSON."""
    Path(path).write_text(json.dumps({"meta": meta(**more), "rows": rows}, indent=1) + "\n")


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    for line in (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    ):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
