"""The process that builds or runs candidates: ``python -m tvmcap.kernel.worker``.

One JSON request a line on standard input, one JSON reply a line on standard output. Candidates may
crash or hang, so nothing of the tuner lives here; the parent kills and restarts it at will.
Whatever else is written to standard output goes to standard error instead.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--without-torch" in sys.argv:
    # tvm_ffi imports torch where it can, which costs seconds a start
    sys.modules["torch"] = None  # type: ignore[assignment]

import numpy as np
import tvm

from tvmcap.base import codegen
from tvmcap.kernel import check, intrinsics
from tvmcap.kernel.graph_timing import CudaError, time_graph

#: By device: bytes of inputs that successive calls rotate through, and most copies of them. A GPU
#: sees its inputs cold; on a CPU a hot block's weights stay in the last cache between calls.
_ROTATED = {"cpu": (0, 1), "cuda": (160 << 20, 64)}
_SAMPLE_S = 0.002


def _find_template(ref: str) -> Any:
    module, _, name = ref.partition(":")
    return getattr(importlib.import_module(module), name)


def compile_to(func: Any, target: Any, path: str) -> None:
    """Compile a PrimFunc into a shared library whose one function is ``main``."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    options = {} if "s_tir" in func.attrs else {"tir_pipeline": "tirx"}
    # MetaSchedule's tensor-core candidates need one shared allocation
    merge = {"tirx.merge_static_smem": True} if target.kind.name == "cuda" else {}
    if merge:
        codegen.use_nvcc()
    with target, tvm.transform.PassContext(config=merge):
        tvm.compile(mod, target, **options).export_library(path)


def build(request: dict[str, Any]) -> dict[str, Any]:
    """Lower (a template's knobs) and compile one candidate."""
    start = time.perf_counter()
    target = tvm.target.Target(request["target"])
    func = tvm.ir.load_json(request["func"])
    if request["template"] is not None:
        try:
            template = _find_template(request["template"])
            problem = template.match(func, target)
            func = template.lower(func, problem, template.knobs_from_json(request["knobs"]), target)
        except Exception as e:
            return _failure("lower", e)
    try:
        if target.kind.name == "llvm":
            func = intrinsics.expand(func)
        compile_to(func, target, request["path"])
    except Exception as e:
        return _failure("compile", e)
    return {"seconds": time.perf_counter() - start}


def reference(request: dict[str, Any]) -> dict[str, Any]:
    """Compute the outputs of the unscheduled function on the request's inputs and save them."""
    target = tvm.target.Target(request["target"])
    library = request["outputs"] + ".so"
    compile_to(check.plain_schedule(tvm.ir.load_json(request["func"]), target), target, library)
    device = tvm.device(request["device"], 0)
    tensors = check.to_device(_inputs(request), device)
    tvm.runtime.load_module(library)["main"](*tensors)
    device.sync()
    outputs = {str(i): check.to_numpy(tensors[i]) for i in request["written"]}
    with Path(request["outputs"]).open("wb") as f:
        np.savez(f, **outputs)
    os.remove(library)
    return {}


_kept: dict[str, Any] = {}


def _inputs(request: dict[str, Any]) -> list[Any]:
    key = json.dumps([request["args"], request["seed"]])
    if _kept.get("key") != key:
        _kept.clear()
        _kept.update(key=key, inputs=check.random_inputs(request["args"], request["seed"]))
    return list(_kept["inputs"])


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Check one candidate against the saved outputs, then time it."""
    device = tvm.device(request["device"], 0)
    inputs = _inputs(request)
    try:
        main = tvm.runtime.load_module(request["path"])["main"]
        tensors = check.to_device(inputs, device)
        main(*_with_numbers(tensors, request["numbers"]))
        device.sync()
    except Exception as e:
        return _failure("run", e)
    if _kept.get("outputs_of") != request["outputs"]:
        with np.load(request["outputs"]) as saved:
            _kept.update(
                outputs_of=request["outputs"], outputs={int(k): saved[k] for k in saved.files}
            )
    for i, expected in _kept["outputs"].items():
        wrong = check.mismatch(check.to_numpy(tensors[i]), expected, request["args"][i]["dtype"])
        if wrong is not None:
            return {"error": {"cause": "wrong result", "message": f"output {i}: {wrong}"}}
    if not request["time_s"]:
        return {"us": []}
    size = sum(x.nbytes for x in inputs)
    wanted, most = _ROTATED[request["device"]]
    copies = min(most, max(1, math.ceil(wanted / max(size, 1)))) if size > wanted // 64 else 1
    sets = [tensors] + [check.to_device(inputs, device) for _ in range(copies - 1)]
    sets = [_with_numbers(s, request["numbers"]) for s in sets]
    if request["device"] == "cuda":
        try:
            return {"us": time_graph(main, sets, device, request["time_s"], request["limit_us"])}
        except CudaError as e:
            return _failure("timing", e)
    return {"us": _time(main, sets, device.sync, request["time_s"], request["limit_us"])}


def _with_numbers(tensors: list[Any], numbers: list[list[int]]) -> list[Any]:
    args = list(tensors)
    for position, value in numbers:
        args.insert(position, value)
    return args


def _time(
    main: Any, sets: list[Any], sync: Callable[[], None], time_s: float, limit_us: float | None
) -> list[float]:
    """Sample microseconds a call; fewer samples where it is far slower than ``limit_us``."""
    rotated = itertools.cycle(sets)

    def sample(number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            main(*next(rotated))
        sync()
        return (time.perf_counter() - start) / number

    once = sample(1)
    if limit_us is not None and once * 1e6 > 4 * limit_us:
        return [sample(1) * 1e6 for _ in range(3)]
    once = min(once, sample(len(sets)))
    number = math.ceil(_SAMPLE_S / max(once, 1e-7))
    count = int(min(30, max(5, time_s / max(once * number, 1e-7))))
    return [sample(number) * 1e6 for _ in range(count)]


def _failure(cause: str, error: Exception) -> dict[str, Any]:
    text = str(error).strip() or repr(error)
    return {"error": {"cause": cause, "message": f"{type(error).__name__}: {text}"[:4000]}}


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main() -> None:
    """Serve requests until standard input ends."""
    _die_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "build": build,
        "reference": reference,
        "run": run,
        "ping": lambda _: {},
    }
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = operations[request["op"]](request)
        except Exception as e:
            reply = _failure(request["op"], e)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
