"""Host time of a call in each mode, allocations, memory over many calls, and time to load.

    python benchmarks/runtime_host.py build FOLDER --target cuda
    python benchmarks/runtime_host.py run FOLDER --json OUT

The first needs no GPU (cross-compiled for an H200), the second TVM's runtime, torch and, for a cuda
library, the GPU. Modes are timed in windows that take turns, each call by itself, with the device's
queue emptied between groups of calls, beside plain Python (steady.py); the clock's own time is part
of each figure and a row of its own.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import host_function, meta
from runtime_memory import memory_rows
from steady import Call, Row, Window, as_long_as, row, window

import tvmcap
from examples.models import gelu_tanh

#: The block: x [B, K], w [K, N], b [N]; tiny on a CPU, so that the kernel hides nothing.
SHAPES = {"cuda": (1024, 4096), "llvm": (32, 48)}
DTYPES = {"cuda": torch.bfloat16, "llvm": torch.float32}
ROWS = {"cuda": 16, "llvm": 1}
MOST_ROWS = 8192
#: Pairs of input and output that the modes with changing addresses rotate through.
ROTATED = 8


def build(folder: Path, target: str) -> None:
    """Write the library that ``run`` measures."""
    folder.mkdir(parents=True, exist_ok=True)
    k, n = SHAPES[target]
    args = tuple(torch.randn(s, dtype=DTYPES[target]) for s in ((16, k), (k, n), (n,)))
    dynamic = {"x": {0: tvmcap.Dim("B", min=1, max=MOST_ROWS)}}
    lib = tvmcap.build(gelu_tanh, args, target=target, dynamic=dynamic, verify=False)
    print(lib.export(folder / "block.so"), lib.manifest.kernels_per_call, "kernels a call")


def modes(path: Path, device: str) -> dict[str, Call]:
    """Return what is timed: each takes the number of the call."""
    kind = "cuda" if device == "cuda" else "llvm"
    k, n = SHAPES[kind]

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPES[kind], device=device)

    w, b = fresh(k, n), fresh(n)
    xs = [fresh(ROWS[kind], k) for _ in range(ROTATED)]
    outs = [torch.empty(ROWS[kind], n, dtype=DTYPES[kind], device=device) for _ in xs]
    x, out = xs[0], outs[0]
    plain = tvmcap.load(path)
    calls: dict[str, Call] = {
        "clock": lambda i: None,
        "no replay, out=": lambda i: plain(x, w, b, out=out),
        "no replay, new output": lambda i: plain(x, w, b),
        "no replay, run()": _bound(plain, x, w, b, out),
    }
    if device == "cuda":
        replayed, bound = tvmcap.load(path), tvmcap.load(path)
        replayed.use_graphs()
        bound.use_graphs()
        again = tvmcap.load(path)
        again.use_graphs()
        rebound = _bound(again, x, w, b, out)

        def rebind(i: int) -> None:
            again.bind("x", xs[i % ROTATED])
            again.bind("out0", outs[i % ROTATED])
            rebound(i)

        calls |= {
            "replay, run()": _bound(bound, x, w, b, out),
            "replay, out=": lambda i: replayed(x, w, b, out=out),
            "replay, new output": lambda i: replayed(x, w, b),
            "replay, other addresses, out=": lambda i: replayed(
                xs[i % ROTATED], w, b, out=outs[i % ROTATED]
            ),
            "replay, other addresses, bind and run()": rebind,
            "replay of eager by torch": _torch_graph(x, w, b),
        }
    else:
        calls["host function alone"] = host_function(plain, x, w, b, out)
    compiled = torch.compile(gelu_tanh, dynamic=False)
    calls |= {
        "eager": lambda i: gelu_tanh(x, w, b),
        "torch.compile": lambda i: compiled(x, w, b),
    }
    want = gelu_tanh(x.double(), w.double(), b.double())
    for name in calls:
        if name.startswith(("replay, run", "replay, out", "no replay, out")):
            for i in range(3):
                out.zero_()
                calls[name](0)
                _synchronize(device)
                error = ((out.double() - want).abs().max() / want.abs().max()).item()
                assert error < 0.02, (name, i, error)
    return calls


def _bound(lib: Any, x: Any, w: Any, b: Any, out: Any) -> Call:
    for name, tensor in zip(("x", "w", "b", "out0"), (x, w, b, out), strict=True):
        lib.bind(name, tensor)
    return lambda i: lib.run()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _torch_graph(x: Any, w: Any, b: Any) -> Call:
    """Return what launches eager's kernels as a CUDA graph that torch recorded."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gelu_tanh(x, w, b)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gelu_tanh(x, w, b)
    return lambda i: graph.replay()


def host_times(calls: dict[str, Call], device: str, count: int, windows: int) -> list[Row]:
    """Time ``count`` calls of each mode, one by one, in each of ``windows`` windows; microseconds.

    The modes take turns, a window each.
    """
    taken: dict[str, list[Window]] = {name: [] for name in calls}
    with torch.no_grad():
        for call in calls.values():  # TVM makes a thread's pool at its first call, of all cores
            for i in range(5 * ROTATED):
                call(i)
        ready = functools.partial(_synchronize, device)
        references = {name: as_long_as(call) for name, call in calls.items()}
        gc.collect()
        gc.disable()
        for _ in range(windows):
            for name, call in calls.items():
                taken[name].append(window(call, references[name], count, ready))
        gc.enable()
    return [
        {"figure": f"call, {name}", "unit": "us", **row(of_mode)} for name, of_mode in taken.items()
    ]


#: In a process where torch cannot be imported, as in a virtual environment without it.
LOAD = """
import json, sys, time
if sys.argv[3] == "without torch":
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name == "torch" or name.startswith("torch."):
                raise ModuleNotFoundError(name)
    sys.meta_path.insert(0, Absent())
begin = time.perf_counter()
import numpy as np
import tvm_ffi
import tvmcap
import tvmcap.compiled
from tvmcap.runtime.loader import empty, ffi
ffi()
imported = time.perf_counter()
lib = tvmcap.load(sys.argv[1])
device, sig = lib.executor._library.device, lib.signature
shapes = [[int(s) if s != "B" else 1 for s in spec.shape] for spec in sig.inputs]
tensors = [empty(tuple(s), spec.dtype, device) for s, spec in zip(shapes, sig.inputs)]
made = time.perf_counter()
y = lib(*tensors)
host = np.zeros(y.numel() * y.dtype.itemsize, np.uint8)
flat = ffi().get_global_func("runtime.TVMTensorCreateView")(
    ffi().from_dlpack(host), tuple(y.shape), y.dtype, 0)
ffi().get_global_func("runtime.TVMTensorCopyFromTo")(y, flat)  # waits for the result
done = time.perf_counter()
assert (sys.argv[3] == "without torch") == ("torch" not in sys.modules), "torch"
print("FIGURES" + json.dumps({"imports": imported - begin, "load to first result": done - imported,
      "of that, the call": done - made}))
"""


def load_times(path: Path, kind: str, runs: int) -> list[dict[str, Any]]:
    """Seconds from load to the first result on the host, in new processes."""
    seen: dict[str, list[float]] = {}
    for how in ("without torch", "with torch"):
        for _ in range(runs):
            command = [sys.executable, "-W", "ignore", "-c", LOAD, str(path), kind, how]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            line = next(x for x in done.stdout.splitlines() if x.startswith("FIGURES"))
            for name, value in json.loads(line[len("FIGURES") :]).items():
                seen.setdefault(f"{name}, {how}", []).append(value)
    rows = []
    for name, values in seen.items():
        ordered = sorted(values)
        middle, least, most = ordered[len(ordered) // 2], ordered[0], ordered[-1]
        row = {"figure": name, "unit": "s", "median": middle, "p10": least, "p90": most}
        rows.append({**row, "samples": values})
    return rows


def main() -> None:
    """Read the command line, build or run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", choices=("cuda", "llvm"), default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--calls", type=int, default=10_000, help="of each mode in a window")
    parser.add_argument("--windows", type=int, default=15, help="of each mode, from 1")
    parser.add_argument("--long", type=int, default=100_000, help="calls of the memory test")
    parser.add_argument("--cycles", type=int, default=1_000, help="of load and unload")
    parser.add_argument("--sizes", type=int, default=1_000, help="random batch sizes")
    parser.add_argument("--runs", type=int, default=5, help="of load to first result")
    options = parser.parse_args()
    if options.windows < 1:
        parser.error("--windows: give a number from 1")
    if options.verb == "build":
        build(options.folder, options.target)
        return
    path = options.folder / "block.so"
    kind = str(tvmcap.load(path).manifest.target["kind"])
    device = "cuda" if kind == "cuda" else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    importlib.import_module("torch._dynamo").config.cache_size_limit = 64
    # else processes that compile for torch.compile start up while calls are timed
    importlib.import_module("torch._inductor.config").compile_threads = 1
    rows = load_times(path, kind, options.runs)
    rows += host_times(modes(path, device), device, options.calls, options.windows)
    counts = {"calls": options.calls, "long": options.long}
    k, n = SHAPES[kind]
    shape = {"k": k, "n": n, "dtype": DTYPES[kind], "most": MOST_ROWS}
    rows += memory_rows(path, device, shape, options.cycles, options.sizes, **counts)
    for found in rows:
        short = {key: value for key, value in found.items() if not key.startswith("samples")}
        print(json.dumps(short), flush=True)
    if options.json:
        problem = {"M": ROWS[kind], "K": k, "N": n, "cores": len(os.sched_getaffinity(0))}
        problem["windows"] = options.windows
        data = {"meta": meta(("runtime",), dtype=str(DTYPES[kind]), **problem), "rows": rows}
        options.json.write_text(json.dumps(data, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
