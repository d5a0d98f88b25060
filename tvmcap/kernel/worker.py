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
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tvmcap.base import codegen, cudart, driver, ir_text
from tvmcap.base.errors import ToolchainError

if "--without-torch" in sys.argv:
    # tvm_ffi imports torch where it can, which costs seconds a start
    sys.modules["torch"] = None  # type: ignore[assignment]
    if "--cuda" in sys.argv:  # what TVM's CUDA side library needs and torch would have brought
        driver.preload()

import numpy as np
import tvm

from tvmcap.kernel import arrays, check, intrinsics, tir_pipeline
from tvmcap.kernel.graph_timing import CudaError, time_graph

#: By device: bytes of inputs that successive calls rotate through, and most copies of them. A GPU
#: sees its inputs cold; on a CPU a hot block's weights stay in the last cache between calls.
_ROTATED = {"cpu": (0, 1), "cuda": (160 << 20, 64)}
_SAMPLE_S = 0.002
#: The arguments of workloads that are kept take at most this part of a device's memory.
_SHARE_OF_MEMORY = 8


def _find_template(ref: str) -> Any:
    module, _, name = ref.partition(":")
    return getattr(importlib.import_module(module), name)


def compile_to(func: Any, target: Any, path: str) -> None:
    """Compile a PrimFunc into a shared library whose one function is ``main``."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    codegen.require_linker()
    if target.kind.name == "cuda":
        codegen.use_nvcc()
    with target:
        done = tvm.compile(mod, target, tir_pipeline=tir_pipeline.name_for(func))
        done.export_library(path)


def build(request: dict[str, Any]) -> dict[str, Any]:
    """Lower (a template's knobs) and compile one candidate."""
    start = time.perf_counter()
    target = tvm.target.Target(request["target"])
    func = ir_text.parse(request["func"])
    if request["template"] is not None:
        try:
            template = _find_template(request["template"])
            problem = template.match(func, target)
            func = template.lower(func, problem, template.knobs_from_json(request["knobs"]), target)
        except Exception as e:
            return failure("lower", e)
    try:
        if target.kind.name == "llvm":
            func = intrinsics.expand(func)
        compile_to(func, target, request["path"])
    except Exception as e:
        return failure("compile", e)
    return {"seconds": time.perf_counter() - start}


def build_plain(request: dict[str, Any]) -> dict[str, Any]:
    """Compile a function as written, for its reference outputs."""
    target = tvm.target.Target(request["target"])
    func = check.plain_schedule(ir_text.parse(request["func"]), target)
    compile_to(func, target, request["path"])
    return {}


def reference(request: dict[str, Any]) -> dict[str, Any]:
    """Compute the outputs of the unscheduled function on the request's inputs and save them."""
    data = _arrays(request)
    (tensors,) = data.sets(1, request["written"])
    tvm.runtime.load_module(request["library"])["main"](*tensors)
    tvm.device(request["device"], 0).sync()
    outputs = {i: check.to_numpy(tensors[i]) for i in request["written"]}
    with Path(request["outputs"]).open("wb") as f:
        np.savez(f, **{str(i): values for i, values in outputs.items()})
    data.expect(outputs)
    return {}


_kept: dict[str, arrays.Kept] = {}


def _arrays(request: dict[str, Any]) -> arrays.Arrays:
    """Return the request's arguments and, once they were computed, the outputs to expect."""
    name, key = request["device"], _key(request)
    device = tvm.device(name, 0)
    if name not in _kept:
        memory = int(device.total_global_memory or 0) if name != "cpu" else 0
        _kept[name] = arrays.Kept(memory // _SHARE_OF_MEMORY)
    data = _kept[name].get(key)
    if data is None:
        data = arrays.draw(request["args"], request["seed"], name, device)
        number = arrays.copies(data.nbytes, *_ROTATED[name])
        _kept[name].put(key, data, data.nbytes * (number + 2))
    if not data.expected and Path(request["outputs"]).exists():
        with np.load(request["outputs"]) as saved:
            data.expect({int(k): saved[k] for k in saved.files})
    return data


def _key(request: dict[str, Any]) -> str:
    return json.dumps([request["outputs"], request["args"], request["seed"]])


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Make the arguments of a workload, so that ``run`` spends its time on the candidate."""
    _arrays(request)
    return {}


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Check one candidate against the reference's outputs, then time it."""
    try:
        main = tvm.runtime.load_module(request["path"])["main"]
        sets, wrong = _checked(main, request)
        if wrong is not None:
            # an earlier candidate may have written where it should not
            _kept[request["device"]].drop(_key(request))
            sets, wrong = _checked(main, request)
    except arrays.HarmError as e:
        return _harm(e)
    except Exception as e:
        return failure("run", e) | _broken(request["device"])
    if wrong is not None:
        return {"error": {"cause": "wrong result", "message": wrong}}
    if not request["time_s"]:
        return {"us": []}
    device = tvm.device(request["device"], 0)
    calls = [with_numbers(s, request["numbers"]) for s in sets]
    if request["device"] != "cuda":
        return {"us": _time(main, calls, device.sync, request["time_s"], request["limit_us"])}
    try:
        us = time_graph(main, calls, device, request["time_s"], request["limit_us"])
        wrong = _arrays(request).mismatch(sets[-1])
        _arrays(request).unharmed(sets[-1])
    except arrays.HarmError as e:
        return _harm(e)
    except CudaError as e:
        return failure("timing", e) | _broken("cuda")
    if wrong is not None:
        return {"error": {"cause": "wrong result", "message": f"when repeated, {wrong}"}}
    return {"us": us}


def _checked(main: Any, request: dict[str, Any]) -> tuple[list[list[Any]], str | None]:
    """Call a candidate once; return the argument sets and what is wrong with the outputs."""
    data = _arrays(request)
    number = arrays.copies(data.nbytes, *_ROTATED[request["device"]])
    sets = data.sets(number if request["time_s"] else 1, request["written"])
    main(*with_numbers(sets[0], request["numbers"]))
    tvm.device(request["device"], 0).sync()
    data.unharmed(sets[0])
    return sets, data.mismatch(sets[0])


def _harm(error: arrays.HarmError) -> dict[str, Any]:
    return {"error": {"cause": "memory corruption", "message": str(error)}, "broken": True}


def _broken(name: str) -> dict[str, bool]:
    """Say whether the device still works: a kernel that faults takes the CUDA context along.

    Lesser errors of CUDA are forgotten.
    """
    cudart.forget_error()
    device = tvm.device(name, 0)
    try:
        device.sync()
        tvm.runtime.tensor(np.zeros(1, np.float32), device).numpy()
    except Exception:
        return {"broken": True}
    return {"broken": False}


def with_numbers(tensors: list[Any], numbers: list[list[int]]) -> list[Any]:
    """Return a call's arguments: tensors, with numbers put in at their positions."""
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
    number, count = samples(once, time_s)
    return [sample(number) * 1e6 for _ in range(count)]


def samples(once: float, time_s: float) -> tuple[int, int]:
    """Return how many calls make a sample, and how many samples, of what takes ``once`` seconds."""
    number = math.ceil(_SAMPLE_S / max(once, 1e-7))
    return number, int(min(30, max(5, time_s / max(once * number, 1e-7))))


def failure(cause: str, error: Exception) -> dict[str, Any]:
    """Return the reply that an exception makes."""
    text = str(error).strip() or repr(error)
    reply: dict[str, Any] = {"error": {"cause": cause}}
    reply["error"]["message"] = f"{type(error).__name__}: {text}"[:4000]
    return reply | ({"machine": True} if isinstance(error, ToolchainError | MemoryError) else {})


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def serve(
    operations: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]],
    idle: tuple[float, Callable[[], None]] | None = None,
) -> None:
    """Answer requests until standard input ends; after each pause of ``idle`` seconds do that."""
    _die_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while True:
        # a request is sent only once the last was answered, so nothing is left in a buffer
        while idle is not None and not select.select([sys.stdin], [], [], idle[0])[0]:
            idle[1]()
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        try:
            reply = operations[request["op"]](request)
        except Exception as e:
            reply = failure(request["op"], e)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main() -> None:
    """Build and run candidates until standard input ends."""
    serve(
        {
            "build": build,
            "build_plain": build_plain,
            "reference": reference,
            "prepare": prepare,
            "run": run,
            "ping": lambda _: {},
        }
    )


if __name__ == "__main__":
    main()
