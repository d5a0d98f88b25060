"""What calls allocate and what stays: counted over many calls, sizes, and loads."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path
from typing import Any

import torch

import tvmcap

#: Sizes of the batch in a mix, and the buckets that random ones are padded to.
MIXED = (1, 2, 3, 5, 8, 13, 16, 21, 32, 47, 64)
BUCKETS = (1, 4, 16, 64, 256, 1024, 8192)

Row = dict[str, Any]


def memory_rows(
    path: Path, device: str, shape: Row, cycles: int, sizes: int, calls: int, long: int
) -> list[Row]:
    """Return one row a count."""
    cuda = device == "cuda"
    rows = mixed_sizes(path, device, shape, calls, graphs=False)
    rows += many_calls(path, device, shape, long, graphs=cuda)
    if cuda:
        rows += mixed_sizes(path, device, shape, calls, graphs=True)
        rows += random_sizes(path, device, shape, sizes)
        rows += random_sizes(path, device, shape, sizes, BUCKETS)
    else:
        rows += random_sizes(path, device, shape, sizes)
    return rows + load_cycles(path, device, shape, cycles)


def tensors(device: str, shape: Row, rows: int) -> tuple[Any, ...]:
    """Return x, w, b and an output."""
    made = [(rows, shape["k"]), (shape["k"], shape["n"]), (shape["n"],), (rows, shape["n"])]
    return tuple(torch.randn(s, dtype=shape["dtype"], device=device) for s in made)


def loaded(path: Path, graphs: bool, buckets: tuple[int, ...] = ()) -> Any:
    """Load the library, with graphs where wanted."""
    lib = tvmcap.load(path)
    if graphs:
        lib.use_graphs(buckets=buckets)
    return lib


def mixed_sizes(path: Path, device: str, shape: Row, calls: int, graphs: bool) -> list[Row]:
    """Count allocations of calls with out=, and of bind, run and output, in steady state."""
    lib = loaded(path, graphs)
    sets = {m: tensors(device, shape, m) for m in MIXED}
    order = random.Random(0).choices(MIXED, k=calls)
    how = "replay" if graphs else "no replay"

    def with_out(m: int) -> None:
        x, w, b, out = sets[m]
        lib(x, w, b, out=out)

    def with_run(m: int) -> None:
        lib.bind("x", sets[m][0])
        lib.run()
        lib.output(0)

    for name in ("w", "b"):
        lib.bind(name, sets[MIXED[0]][{"w": 1, "b": 2}[name]])
    rows = []
    with torch.no_grad():
        for name, call in (("out=", with_out), ("bind, run, output", with_run)):
            for m in (*reversed(MIXED), *MIXED, *MIXED):  # the largest first, then each recorded
                call(m)
            before = allocations(lib, device)
            for m in order:
                call(m)
            made = allocations(lib, device) - before
            made += profiled(lambda call=call: [call(m) for m in order[:200]])
            figure = f"allocations, {how}, {name}, {calls} calls of mixed sizes"
            rows.append({"figure": figure, "unit": "", "median": made})
    return rows


def allocations(lib: Any, device: str) -> int:
    """Count what torch's allocator and the library's own memory gave out so far."""
    counts = lib.counts
    own = counts.growths + counts.copies + counts.captures
    if device == "cuda":
        own += torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    return own


def profiled(run: Any) -> int:
    """Count the allocations of tensors that torch's profiler sees on the CPU."""
    with torch.autograd.profiler.profile(profile_memory=True) as seen:
        run()
    return sum(event.cpu_memory_usage > 0 for event in seen.function_events)


def many_calls(path: Path, device: str, shape: Row, calls: int, graphs: bool) -> list[Row]:
    """Compare memory after a tenth of the calls with that after all."""
    lib = loaded(path, graphs)
    sets = [tensors(device, shape, m) for m in MIXED]
    with torch.no_grad():

        def some(count: int) -> None:
            for i in range(count):
                x, w, b, out = sets[i % len(sets)]
                lib(x, w, b, out=out) if i % 2 else lib(x, w, b)

        some(calls // 10)
        before = memory(device)
        some(calls - calls // 10)
        after = memory(device)
    return growth(f"over {calls} calls", before, after)


def load_cycles(path: Path, device: str, shape: Row, cycles: int) -> list[Row]:
    """Compare memory after a tenth of the loads and unloads with that after all."""
    x, w, b, _ = tensors(device, shape, 4)

    def some(count: int) -> None:
        for _ in range(count):
            lib = loaded(path, device == "cuda")
            for _ in range(3):
                lib(x, w, b)
            lib.close()

    some(max(1, cycles // 10))
    before = memory(device)
    start = time.perf_counter()
    some(cycles - cycles // 10)
    seconds = (time.perf_counter() - start) / max(1, cycles - cycles // 10)
    rows = growth(f"over {cycles} loads and unloads", before, memory(device))
    rows.append({"figure": "one load, three calls, unload", "unit": "s", "median": seconds})
    return rows


def memory(device: str) -> dict[str, int]:
    """Bytes of this process, and of the device where there is one."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"process": pages * 4096}
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        found["device"] = total - free
    return found


def growth(what: str, before: dict[str, int], after: dict[str, int]) -> list[Row]:
    """One row a kind of memory, in MiB."""
    return [
        {
            "figure": f"growth of the {name}'s memory {what}",
            "unit": "MiB",
            "median": (after[name] - before[name]) / 2**20,
            "before_bytes": before[name],
            "after_bytes": after[name],
        }
        for name in before
    ]


def random_sizes(
    path: Path, device: str, shape: Row, sizes: int, buckets: tuple[int, ...] = ()
) -> list[Row]:
    """Call at random batch sizes: captures, and the slowest call after the first."""
    cuda = device == "cuda"
    lib = loaded(path, cuda, buckets)
    x, w, b, _ = tensors(device, shape, shape["most"])
    drawn = random.Random(1)
    slowest, start = 0.0, 0.0
    with torch.no_grad():
        for i in range(sizes):
            m = drawn.randint(1, shape["most"])
            start = time.perf_counter()
            lib(x[:m], w, b)
            if cuda:
                torch.cuda.synchronize()
            slowest = max(slowest, time.perf_counter() - start if i > 10 else 0.0)
    how = f"{len(buckets)} buckets" if buckets else "exact sizes"
    rows = [{"figure": f"slowest of {sizes} random sizes, {how}", "unit": "s", "median": slowest}]
    if cuda:
        figure = f"captures over {sizes} random sizes, {how}"
        counts = lib.counts
        rows.append({"figure": figure, "unit": "", "median": counts.captures})
        rows[-1]["fallbacks"] = dict(counts.fallbacks)
    return rows
