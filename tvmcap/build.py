"""build: the whole story, from a PyTorch function to a library."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tvmcap import cache, chain, pipeline, training, versions
from tvmcap.base import codegen
from tvmcap.base.config import Config, make_config
from tvmcap.base.errors import CaptureError, DamagedLibraryError, IncompatibleLibraryError
from tvmcap.base.manifest import read_manifest
from tvmcap.capture.export import capture, fingerprint
from tvmcap.capture.training import capture_training
from tvmcap.compiled import Compiled
from tvmcap.kernel import models, registry
from tvmcap.kernel.stores import open_stores
from tvmcap.library import entry, export, lower, weights
from tvmcap.quantized import measured_on, quantizer
from tvmcap.runtime.loader import configure_threads
from tvmcap.runtime.opening import open_library
from tvmcap.scoreboard import counted
from tvmcap.verify.check import example_leaves, verify
from tvmcap.verify.inputs import example_sizes
from tvmcap.view.explain import tuning_notice

logger = logging.getLogger("tvmcap")


def build(
    fn: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    config: Config | None = None,
    **options: Any,
) -> Any:
    """Compile a PyTorch function, module, ExportedProgram or .pt2 file into a library.

    Parameters
    ----------
    fn: what to compile. The parameters of a module are frozen; the arguments of a function stay
        arguments.
    args, kwargs: example inputs (torch, numpy or DLPack tensors); without them the first call
        captures.
    config, options: fields of ``Config``, such as ``target="cuda"``, ``dynamic={"x": {0: "B"}}``,
        ``tune=64``.

    Returns
    -------
    A ``Compiled`` (or, without ``args``, a ``Lazy`` that becomes one at its first call).

    Raises
    ------
    ConfigError, CaptureError, BuildError, VerifyError: see ``tvmcap.errors``.
    """
    config = make_config(config, **options)
    pipeline.check_disable(config.disable)
    if args is None and kwargs is None and not _has_examples(fn):
        from tvmcap.lazy import Lazy

        return Lazy(fn, config)
    return compile_once(fn, args, kwargs if kwargs is None else dict(kwargs), config)


def compile_once(
    fn: Any, args: Sequence[Any] | None, kwargs: dict[str, Any] | None, config: Config
) -> Compiled:
    """Find the library in the compile cache or make it, load it, and verify it where nobody did."""
    start = time.perf_counter()
    if isinstance(fn, str | os.PathLike) and not Path(fn).is_file():
        raise CaptureError(
            f"{os.fspath(fn)!r} is no file; expected one that torch.export.save wrote"
        )
    target = codegen.make_target(config.target)
    stores = open_stores(config, target)
    made: dict[str, Any] = {}

    def make(path: Path) -> None:
        made.update(_make(fn, args, kwargs, config, target, stores, key, path, start))

    key = cache.key(_identity(fn, args, kwargs, config, target, stores))
    path = cache.store(key, make, config.cache_dir)
    try:
        compiled = _open(path, config, made)
    except DamagedLibraryError as e:
        logger.warning("the cached library is damaged and is built again: %s", e)
        cache.drop(key, config.cache_dir)
        compiled = _open(cache.store(key, make, config.cache_dir), config, made)
    if compiled.capture_again is None:
        compiled.capture_again = lambda: _capture(fn, args, kwargs, config)
    if config.backward and compiled.executor is not None and isinstance(fn, torch.nn.Module):
        compiled.executor.use_module(fn)
    if not compiled.from_cache or (config.verify and not compiled.manifest.verified):
        _report(compiled, config)
    return compiled


def _make(
    fn: Any,
    args: Any,
    kwargs: Any,
    config: Config,
    target: Any,
    stores: Any,
    key: str,
    path: Path,
    start: float,
) -> dict[str, Any]:
    """Run the chain: capture, passes, tuning where asked for, codegen, one file."""
    trace = pipeline.Trace()
    if config.backward:
        both = trace.timed("capture", lambda: _capture(fn, args, kwargs, config))
        made = training.make(both, config, target, stores, key, path, start, trace)
        return {"capture_again": lambda: both, **made}
    configure_threads()  # before any kernel runs here: TVM's pool cannot grow later
    captured = trace.timed("capture", lambda: capture(fn, args, kwargs, config))
    quantize = quantizer(captured, config, target)
    planned = chain.planned(captured.mod, config, target, stores, trace, quantize)
    bare, large = weights.lift(planned)
    executable = trace.timed("lower", lambda: lower.lower(entry.add(bare, target), target))
    manifest = chain.manifest(
        [planned],
        captured.signature,
        config,
        target,
        trace,
        key,
        start,
        frozen=captured.frozen,
        quantization=None if quantize is None else quantize.to_json(),
    )
    sizes = example_sizes(manifest.signature, example_leaves(captured))
    score = counted(manifest, sizes, manifest.kernels).to_json()
    manifest = replace(manifest, score=score)
    trace.timed("export", lambda: export.write(executable, path, manifest, large))
    return {"capture_again": lambda: captured, "module": planned, "passes": trace.seconds}


def _capture(fn: Any, args: Any, kwargs: Any, config: Config) -> Any:
    return (capture_training if config.backward else capture)(fn, args, kwargs, config)


def _open(path: Path, config: Config, made: dict[str, Any]) -> Compiled:
    """Load the file where this machine can run it."""
    try:
        executor: Any = open_library(path)
        foreign = ""
    except IncompatibleLibraryError as e:
        executor, foreign = None, str(e)
    manifest = executor.manifest if executor is not None else read_manifest(path)
    return Compiled(
        path, manifest, executor, foreign, config=config, from_cache="module" not in made, **made
    )


def _report(compiled: Compiled, config: Config) -> None:
    """Verify a library where that is wanted and possible, and say how much of it is tuned."""
    if config.verify and compiled.executor is not None:
        report = verify(compiled)
        compiled.mark_verified(report.ok)
        logger.info("%s", report)
        report.require()
    elif config.verify:
        compiled.mark_verified(False)
        logger.warning("not verified, this machine cannot run it: %s", compiled.foreign)
    notice = tuning_notice(compiled.manifest.coverage)
    if notice:
        logger.log(logging.WARNING if "tvmcap tune" in notice else logging.INFO, "%s", notice)


def _identity(
    fn: Any, args: Any, kwargs: Any, config: Config, target: Any, stores: Any
) -> dict[str, Any]:
    """Everything that decides the bytes of the library."""
    return {
        "source": fingerprint(fn, args, kwargs, config),
        "gradients": _wanted(fn, args, kwargs) if config.backward else None,
        "example": measured_on(fn, args, kwargs, config),
        "config": config.to_json(only_code=True),
        "target": codegen.describe(target),
        "versions": versions.versions(),
        "compiler": versions.source_hash(),
        "templates": registry.identity(),
        "records": [] if config.tune == "none" else stamp(stores),
    }


def _wanted(fn: Any, args: Any, kwargs: Any) -> list[bool]:
    """Tell which parameters and arguments require grad, in order."""
    own = list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []
    given = tree_leaves((args, kwargs))
    return [t.requires_grad for t in (*own, *given) if isinstance(t, torch.Tensor)]


def stamp(stores: Any) -> list[list[Any]]:
    """Tell one state of the files of records and models from another without reading them."""
    found = [(store.path, *models.files(store.folder)) for store in stores.stores]
    files = [path for paths in found for path in paths if path.is_file()]
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _has_examples(fn: Any) -> bool:
    return isinstance(fn, str | os.PathLike) or type(fn).__name__ == "ExportedProgram"
