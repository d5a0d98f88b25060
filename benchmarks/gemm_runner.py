"""A process that checks and times kernels of the block; a parent may kill it at any time.

One JSON request a line on standard input, one JSON reply a line on standard output:
``open`` a shape, take samples of its ``baselines``, ``time`` a library.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import gemm_timing as timing
import torch

from tvmcap.runtime.loader import ffi, load_cuda_runtime


class Runner:
    """One shape at a time, with its inputs and the graphs of its baselines."""

    def __init__(self) -> None:
        load_cuda_runtime()
        self.device = ffi().device("cuda", 0)
        self.stream = torch.cuda.Stream()
        self.loaded: dict[str, Any] = {}

    def open(self, m: int, k: int, n: int, layout: str, seed: int) -> dict[str, Any]:
        """Make the inputs and capture the baselines; return the errors of these."""
        self.inputs = self.graphs = None  # gives the memory of the last shape back
        torch.cuda.empty_cache()
        self.inputs = timing.gemm_inputs(m, k, n, seed)
        from_dlpack = ffi().from_dlpack
        self.arguments = [
            [from_dlpack(s[name]) for name in ("x", layout, "b", "out")] for s in self.inputs.sets
        ]
        self.graphs, errors, refused = {}, {}, {}
        for name, call in timing.baselines().items():
            try:
                errors[name] = self.inputs.error(call(self.inputs.sets[0]))
                self.graphs[name] = timing.Graph(call, self.inputs, self.stream)
            except RuntimeError as e:
                refused[name] = str(e)[:300]
        torch.cuda.synchronize()
        return {"errors": errors, "refused": refused, "sets": len(self.inputs.sets)}

    def baselines(self, seconds: float) -> dict[str, Any]:
        """Take samples of each baseline in turn."""
        return {"us": {name: graph.time(seconds) for name, graph in self.graphs.items()}}

    def time(self, path: str, seconds: float) -> dict[str, Any]:
        """Check a library on poisoned outputs, time it, and check what the timed calls wrote."""
        if path not in self.loaded:
            self.loaded[path] = ffi().load_module(path)["main"]
        main, inputs = self.loaded[path], self.inputs
        index = {id(s): i for i, s in enumerate(inputs.sets)}

        def call(one: dict[str, Any]) -> None:
            with ffi().use_raw_stream(self.device, torch.cuda.current_stream().cuda_stream):
                main(*self.arguments[index[id(one)]])

        inputs.poison()
        call(inputs.sets[0])
        error = inputs.error(inputs.sets[0]["out"])
        if not error <= timing.TOLERANCE:
            return _failure("wrong result", f"relative error {error:.3g}")
        graph = timing.Graph(call, inputs, self.stream)
        us = graph.time(seconds)
        again = max(inputs.error(inputs.sets[i]["out"]) for i in {0, len(inputs.sets) - 1})
        if not again <= timing.TOLERANCE:
            return _failure("wrong when repeated", f"relative error {again:.3g}")
        return {"us": us, "error_size": max(error, again)}


def _failure(cause: str, message: str, fatal: bool = False) -> dict[str, Any]:
    return {"error": {"cause": cause, "message": message[:500], "fatal": fatal}}


def _usable() -> bool:
    """Whether the CUDA context still works; a kernel that faults takes it along."""
    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


def main() -> None:
    """Serve requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runner: Runner | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            runner = runner or Runner()
            reply = getattr(runner, request.pop("op"))(**request)
        except Exception as e:
            reply = _failure("run", f"{type(e).__name__}: {e}", fatal=not _usable())
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
