"""What every benchmark writes: raw samples, and where, when and with what they were taken."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
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
        "command": command(sys.argv),
        **more,
    }


def command(argv: Sequence[str]) -> str:
    """Write a command without the places of this machine.

    The value of ``--json`` is OUT; a path inside the project is relative to the project, one
    outside is FILE or FOLDER; a name alone stays.
    """
    words = [Path(argv[0]).name]
    for before, word in pairwise(argv):
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            words.append(option + equals + (_place(option, value) if value else ""))
        else:
            words.append(_place(before, word))
    return " ".join(words)


def _place(option: str, value: str) -> str:
    if option == "--json":
        return "OUT"
    path = Path(value)
    if len(path.parts) < 2 and not path.is_absolute():
        return value
    if path.resolve().is_relative_to(ROOT):
        return path.resolve().relative_to(ROOT).as_posix()
    return "FILE" if path.suffix and not path.is_dir() else "FOLDER"


def host_function(lib: Any, *tensors: Any) -> Callable[..., object]:
    """Return a call of a library's native entry alone, on inputs and outputs in order.

    Whatever it is given is ignored.
    """
    import tvm_ffi

    arena = lib.executor._threads.here.arena
    passed = (*map(tvm_ffi.from_dlpack, tensors), *arena.tail)
    return lambda *_: arena.entry(*passed)


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
