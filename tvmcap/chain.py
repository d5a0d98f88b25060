"""From a captured module to one with scheduled kernels and planned storage, tuned where asked."""

from __future__ import annotations

from typing import Any

import tvm

from tvmcap import pipeline
from tvmcap.base.config import Config
from tvmcap.graph.rename import prefix_kernels
from tvmcap.kernel.choice import Chooser
from tvmcap.kernel.stores import open_stores


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
        return [] if config.tune == "none" else stores.best_by_size(task.key, target)

    choose = None if config.tune == "none" else Chooser(stores, target)
    return pipeline.run(fused, pipeline.back(target, lookup, trace, choose), target, config, trace)
