"""Libraries with gradients: a forward and a backward entry in one file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tvmcap import chain, pipeline, training_score
from tvmcap.base.config import Config
from tvmcap.capture.training import TrainingCapture
from tvmcap.graph import rename
from tvmcap.library import arena, entry, export, lower
from tvmcap.runtime.loader import configure_threads
from tvmcap.verify.check import example_leaves
from tvmcap.verify.inputs import example_sizes
from tvmcap.view import kernels


def make(
    captured: TrainingCapture,
    config: Config,
    target: Any,
    stores: Any,
    key: str,
    path: Path,
    start: float,
    trace: pipeline.Trace,
) -> dict[str, Any]:
    """Run the chain for both entries, and write them to one library."""
    configure_threads()
    if isinstance(config.tune, int):  # each entry gets half
        config = replace(config, tune=max(1, config.tune // 2))
    sides = {"forward": captured.forward, "backward": captured.backward}
    planned = {
        name: chain.planned(side.mod, config, target, stores, trace, prefix=f"{name}_")
        for name, side in sides.items()
    }
    module = rename.join(planned)
    executable = trace.timed("lower", lambda: lower.lower(entry.add(module, target), target))
    tables = {
        name: kernels.table(planned[name], side.entry.signature) for name, side in sides.items()
    }
    found = captured.training
    training = replace(
        found,
        forward=replace(found.forward, arena=arena.sizes(planned["forward"])),
        backward=replace(found.backward, arena=arena.sizes(planned["backward"])),
        kernels=tables,
    )
    modules = tuple(planned.values())
    manifest = chain.manifest(
        modules, captured.signature, config, target, trace, key, start, training=training
    )
    sizes = example_sizes(manifest.signature, example_leaves(captured))
    manifest = replace(manifest, score=training_score.counted(manifest, sizes).to_json())
    trace.timed("export", lambda: export.write(executable, path, manifest, None))
    return {"module": module, "passes": trace.seconds}
