"""From a captured module to one with scheduled kernels and planned storage, tuned where asked.

And what its library says of itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import tvm

from tvmcap import pipeline, versions
from tvmcap.base import codegen
from tvmcap.base.config import Config
from tvmcap.base.manifest import Manifest
from tvmcap.base.signature import Signature
from tvmcap.graph.rename import prefix_kernels
from tvmcap.kernel import apply
from tvmcap.kernel.admission import admitted
from tvmcap.kernel.choice import Chooser
from tvmcap.kernel.stores import open_stores
from tvmcap.library import arena
from tvmcap.view import kernels


def planned(
    mod: tvm.IRModule,
    config: Config,
    target: Any,
    stores: Any,
    trace: pipeline.Trace,
    quantize: pipeline.Pass | None = None,
    prefix: str = "",
) -> tvm.IRModule:
    """Run all passes, and the tuner between them where ``config.tune`` is a number of trials.

    ``prefix`` goes before the names of kernels; ``trace`` learns seconds and coverage.
    """
    front = pipeline.front(target, config.allow_tf32, config.vendor_matmul, quantize)
    fused = prefix_kernels(pipeline.run(mod, front, target, config, trace), prefix)
    if isinstance(config.tune, int):
        from tvmcap.tune import tune_module
        from tvmcap.view.progress import default_progress

        trace.timed("tune", lambda: tune_module(fused, target, config, progress=default_progress()))
        stores = open_stores(config, target)

    def lookup(task: Any) -> Any:
        return [] if config.tune == "none" else admitted(stores, task, target)

    choose = None if config.tune == "none" else Chooser(stores, target)
    return pipeline.run(fused, pipeline.back(target, lookup, trace, choose), target, config, trace)


def manifest(
    modules: Sequence[tvm.IRModule],
    signature: Signature,
    config: Config,
    target: Any,
    trace: pipeline.Trace,
    key: str,
    start: float,
    **more: Any,
) -> Manifest:
    """Say what a library of planned modules, one an entry, is and holds.

    ``signature`` is the convention of a call, ``trace`` what ``planned`` filled, ``key`` that of
    the compile cache, ``start`` the reading of ``time.perf_counter`` when the build began; ``more``
    are further fields. A library of several entries has the tables of kernels and the arenas with
    those, in ``Manifest.training``.
    """
    peaks = [pipeline.peak_bytes(mod) for mod in modules]
    known = [peak for peak in peaks if peak is not None]
    if len(modules) == 1:
        (mod,) = modules
        more = {"kernels": kernels.table(mod, signature), "arena": arena.sizes(mod), **more}
    return Manifest(
        versions=versions.versions(),
        target=codegen.describe(target),
        signature=signature,
        coverage=tuple(
            task.to_json()
            for task in trace.coverage
            if any(pipeline.calls(mod, task.task) for mod in modules)
        ),
        kernels_per_call=sum(map(pipeline.count_kernels, modules)),
        build_s=time.perf_counter() - start,
        config=config.to_json(),
        key=key,
        peak_bytes=max(known) if len(known) == len(peaks) else None,
        needs=apply.needs(trace.coverage),
        **more,
    )
