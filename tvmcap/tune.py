"""Tune: measure candidates for every kernel of a program, and keep what was found as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tvmcap.base.config import Config, make_config
from tvmcap.kernel import remote, spaces, tasks
from tvmcap.kernel.results import Progress, TaskResult, TuneRun
from tvmcap.kernel.stores import open_stores
from tvmcap.kernel.tuner import DEFAULT_TRIALS, Run


def tune(
    fn: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    trials: int | None = None,
    config: Config | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> TuneRun:
    """Tune the kernels of a PyTorch function or module, and write records that ``build`` then uses.

    Parameters
    ----------
    fn, args, kwargs: as for ``build``; example inputs are needed.
    trials: candidates to measure in all (64 unless ``config.tune`` is a number).
    config, options: fields of ``Config``; ``budget_s`` limits the seconds, ``log_dir`` says where
        records go, ``rpc`` and ``key`` name servers that measure in the place of this machine.
    progress: what to tell; None for a display on a terminal and log lines elsewhere.

    Returns
    -------
    A ``TuneRun``; Ctrl-C returns what was found until then.

    Raises
    ------
    CaptureError, BuildError, RecordError (the log folder cannot be written), TuneError (nothing can
    be measured: no device, no RPC tracker, no server under the key).
    """
    from tvmcap import pipeline
    from tvmcap.base.codegen import make_target
    from tvmcap.capture.export import capture
    from tvmcap.capture.training import capture_training
    from tvmcap.quantized import quantizer
    from tvmcap.view.progress import default_progress

    config = make_config(config, **options)
    config = replace(
        config, tune=trials or (config.tune if isinstance(config.tune, int) else DEFAULT_TRIALS)
    )
    target = make_target(config.target)
    check(config, target)
    if config.backward:
        both = capture_training(fn, args, kwargs, config)
        mods, quantize = [both.forward.mod, both.backward.mod], None
    else:
        captured = capture(fn, args, kwargs, config)
        mods, quantize = [captured.mod], quantizer(captured, config, target)
    passes = pipeline.front(target, config.allow_tf32, config.vendor_matmul, quantize)
    fused = [pipeline.run(mod, passes, target, config, pipeline.Trace()) for mod in mods]
    return tune_modules(fused, target, config, progress or default_progress())


def check(config: Config, target: Any) -> None:
    """See, before anything is built, that records can be written and RPC servers are there.

    Raises RecordError or TuneError.
    """
    open_stores(config, target).writer.check_writable()
    remote.connect(config, target)


def tune_module(
    mod: Any,
    target: Any,
    config: Config,
    progress: Progress | None = None,
    *,
    find: tasks.Find = spaces.find,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> TuneRun:
    """Tune a fused module within ``config.tune`` trials and ``config.budget_s`` seconds.

    ``sizes`` gives the values of symbolic dimensions to tune at, by name; ``find`` picks the search
    spaces.
    """
    return tune_modules([mod], target, config, progress, find=find, sizes=sizes)


def tune_modules(
    mods: Sequence[Any],
    target: Any,
    config: Config,
    progress: Progress | None = None,
    *,
    find: tasks.Find = spaces.find,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> TuneRun:
    """Tune several fused modules, as ``tune_module`` does one, within one limit for all."""
    check(config, target)
    stores = open_stores(config, target)
    run = Run(config, target, stores, progress)
    found = [task for mod in mods for task in tasks.extract(mod, target, find)]
    if found:
        run.search(found, sizes)
    return run.result()


__all__ = ["Progress", "TaskResult", "TuneRun", "tune", "tune_module"]
