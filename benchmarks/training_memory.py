"""An MLP of eight layers over memory budgets: what is saved, memory at its peak, time of a step.

Budgets whose partition of the graph is the same share a library, which is built and measured once.
``planned`` counts what the libraries say of themselves and needs no GPU; ``measured`` runs them.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import timed
from torch import nn

import tvmcap
from tvmcap.base.config import Config
from tvmcap.base.manifest import Manifest, read_manifest
from tvmcap.base.numerics import EAGER_FACTOR
from tvmcap.base.timing import measure
from tvmcap.capture.training import capture_training
from tvmcap.training_score import saved_bytes
from tvmcap.view.traffic import nbytes

LAYERS, WIDTH, ROWS = 8, 4096, 4096
BUDGETS = tuple(i / 10 for i in range(10, -1, -1))
_LIBRARIES = "deep.json"

Row = dict[str, Any]
Shape = tuple[int, int, int]
"""Layers, width, rows."""


def deep(layers: int = LAYERS, width: int = WIDTH) -> nn.Module:
    """The MLP, in bf16."""
    torch.manual_seed(0)
    parts = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU("tanh"))]
    return nn.Sequential(*parts).bfloat16()


def build(folder: Path, shape: Shape = (LAYERS, WIDTH, ROWS), **options: Any) -> dict[str, str]:
    """Build a library for each partition that is not there yet; returns its file for a budget."""
    layers, width, rows = shape
    module = deep(layers, width)
    x = torch.zeros(rows, width).bfloat16().requires_grad_()
    files: dict[str, str] = {}
    for budget in BUDGETS:
        config = Config(backward=True, memory_budget=budget)
        found = capture_training(module, (x,), None, config)
        text = "".join(side.mod.script() for side in (found.forward, found.backward))
        name = f"deep-{hashlib.sha256(text.encode()).hexdigest()[:12]}.so"
        files[f"{budget:g}"] = name
        if not (folder / name).exists():
            lib = tvmcap.build(module, (x,), memory_budget=budget, backward=True, **options)
            lib.export(folder / name)
            print(folder / name, lib.explain(), flush=True)
    (folder / _LIBRARIES).write_text(json.dumps(files, indent=1) + "\n")
    return files


def libraries(folder: Path) -> dict[float, Path]:
    """Return the library of each budget, largest first."""
    files = json.loads((folder / _LIBRARIES).read_text())
    return {float(budget): folder / name for budget, name in files.items()}


def planned(folder: Path, shape: Shape = (LAYERS, WIDTH, ROWS)) -> list[Row]:
    """Count one row a budget: bytes saved, beside eager's, and the planned peak."""
    layers, width, rows = shape
    with torch.device("meta"):
        module, x = deep(layers, width), torch.zeros(rows, width, dtype=torch.bfloat16)
    kept = eager_saved(module, x.requires_grad_())
    return [
        {**_names(shape, budget, path), "eager_saved_bytes": kept, **counted(read_manifest(path))}
        for budget, path in libraries(folder).items()
    ]


def counted(manifest: Manifest) -> Row:
    """Bytes saved and, arguments apart, alive at the end of a step, when most is.

    Then the outputs and gradients are written, what was saved is still there, and so is the memory
    of both entries' intermediates, which they keep.
    """
    training = manifest.training
    assert training is not None
    entries = (training.forward, training.backward)
    arenas = sum(int(size) for entry in entries for size in entry.arena)
    written = [o for entry in entries for o in entry.signature.outputs]
    results = sum(nbytes(o.dtype, o.shape, {}) for o in written)
    return {
        "saved_bytes": saved_bytes(training, {}),
        "arena_bytes_planned": arenas,
        "peak_bytes_planned": arenas + results,
        "kernels": manifest.kernels_per_call,
    }


def _names(shape: Shape, budget: float, path: Path) -> Row:
    layers, width, rows = shape
    case = f"{layers} layers of {width}, {rows} rows"
    return {"kind": "budget", "case": case, "memory_budget": budget, "library": path.name}


def eager_saved(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the storages that eager keeps for backward, parameters and the input apart."""
    known = {t.untyped_storage()._cdata for t in (x, *module.parameters())}
    kept: dict[int, torch.UntypedStorage] = {}  # storages, so that none is freed and found again

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        result = module(x)
    del result
    return sum(storage.nbytes() for storage in kept.values())


def measured(
    folder: Path, budget_s: float, compiled: bool, shape: Shape = (LAYERS, WIDTH, ROWS)
) -> list[Row]:
    """Measure one row a budget on the GPU; budgets of one library share its figures."""
    layers, width, rows = shape
    module = deep(layers, width).cuda()
    x = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn_like(x).detach()
    wanted = [x, *module.parameters()]
    others: dict[str, Step] = {"budget_1": steps_of(libraries(folder)[1.0], module)}
    others["eager"] = lambda x, dy: torch.autograd.grad(module(x), wanted, dy)
    if compiled:
        fast = torch.compile(module)
        others["torch_compile"] = lambda x, dy: torch.autograd.grad(fast(x), wanted, dy)
    eager: Row = {"eager_saved_bytes": eager_saved(module, x)}
    eager["eager_peak_bytes"] = peak(module, x, dy)
    exact = gradients(deep(layers, width).cuda().double(), x.double(), dy.double())
    eager["eager_error"] = error = distance(others["eager"](x, dy), exact)
    paths = libraries(folder)
    found: dict[Path, Row] = {}
    for path in dict.fromkeys(paths.values()):
        lib = tvmcap.load(path)
        lib.executor.use_module(module)
        row = {**eager, **counted(lib.manifest), **memory(lib, x, dy)}
        row["error"] = distance(torch.autograd.grad(lib(x), wanted, dy), exact)
        row["right"] = row["error"] <= EAGER_FACTOR * error
        step = steps_of(path, module)
        found[path] = {**row, **step_times(step, others, (x, dy), budget_s)}
        lib.executor.close()
    return [{**_names(shape, b, path), **found[path]} for b, path in paths.items()]


Step = Callable[..., Any]


def steps_of(path: Path, module: nn.Module) -> Step:
    """Return a function of x and dy that runs a library's two entries one after the other."""
    executor = tvmcap.load(path).executor
    executor.use_module(module)
    state = executor.state()

    def step(x: torch.Tensor, dy: torch.Tensor) -> Any:
        _, saved = executor.split(executor.forward(*state, x.detach()))
        return executor.backward(*saved, dy)

    return step


def step_times(
    ours: Step, others: dict[str, Step], values: Sequence[torch.Tensor], budget_s: float
) -> Row:
    """Time a step in turns with the same at a budget of 1, and with the baselines."""
    calls = {"ours": ours, **others}
    for call in calls.values():
        call(*values)
    times = measure(calls, [values], device="cuda", budget_s=budget_s, samples=51, graph=True)
    mine, first = times.pop("ours"), times["budget_1"]
    best = min(t.median for name, t in times.items() if name != "budget_1")
    return {
        "ours_us": timed(mine),
        "baselines_us": {name: timed(t) for name, t in times.items()},
        "over_budget_1": mine.median / first.median,
        "speedup_vs_best": best / mine.median,
    }


def gradients(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(module(x), [x, *module.parameters()], dy))


def distance(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Largest distance of a gradient from the exact one, over the size of that (2-norms)."""
    pairs = zip(found, exact, strict=True)
    return max(float((f.double() - e).norm() / e.norm()) for f, e in pairs)


def memory(lib: Any, x: torch.Tensor, dy: torch.Tensor) -> Row:
    """Measure the peak of a step of a library, through autograd as a user runs it.

    ``peak_bytes`` is that of torch's tensors plus the library's own memory, of every thread (the
    gradient's is autograd's). ``outside_bytes``, beside it, is what the device gave out to anything
    but torch's allocator, code included.
    """
    before = _outside()
    tensors = peak(lib, x, dy)
    arenas = lib.executor.arena_bytes
    return {
        "peak_bytes": tensors + arenas,
        "torch_peak_bytes": tensors,
        "arena_bytes": arenas,
        "outside_bytes": _outside() - before,
    }


def peak(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dy: torch.Tensor) -> int:
    """Bytes of torch's tensors at the peak of a forward and a backward call, those before apart."""
    wanted = [x, *(p for p in _parameters(fn))]

    def step() -> None:
        y = fn(x)
        torch.autograd.grad(y, wanted, dy)

    for _ in range(2):  # workspaces that stay
        step()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def _parameters(fn: Any) -> Sequence[torch.Tensor]:
    """Parameters of a module, or of the one that a library reads."""
    return list(fn.parameters()) if isinstance(fn, nn.Module) else fn.executor.state()


def _outside() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())
