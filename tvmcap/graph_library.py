"""FX graphs of ATen operators to compiled callables: what a compiler of graphs plugs in.

The graphs are those that AOTAutograd makes with ``capture.decompositions.for_training()``:
functional, their nodes with ``meta["val"]``, inputs flat tensors and sizes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tvmcap import cache, chain, pipeline, versions
from tvmcap.base import codegen
from tvmcap.base.config import Config, Dim
from tvmcap.build import stamp
from tvmcap.capture import custom, graphs
from tvmcap.capture.partition import Pair
from tvmcap.kernel import registry
from tvmcap.kernel.stores import open_stores
from tvmcap.library import entry as entries
from tvmcap.library import export, lower
from tvmcap.runtime.executor import Executor
from tvmcap.runtime.graph_call import GraphCall
from tvmcap.runtime.loader import configure_threads


def compile_pair(pair: Pair, config: Config) -> tuple[GraphCall, GraphCall]:
    """Compile a forward and a backward graph (``capture.partition.partition`` makes them)."""
    return compile_graph(pair.forward, config), compile_graph(pair.backward, config)


def compile_graph(
    graph: fx.GraphModule, config: Config, dims: Mapping[str, Dim] | None = None
) -> GraphCall:
    """Compile one graph for the device that ``config.target`` names, through the compile cache.

    Parameters
    ----------
    graph: it may be simplified in place.
    config: ``target``, ``tune``, ``disable``, ``allow_tf32``, ``vendor_matmul`` and where things
        lie matter here.
    dims: bounds of symbolic sizes, by the name of torch's symbol.

    Returns
    -------
    A callable that takes the graph's inputs (tensors, and ints for sizes) in order and returns the
    list of its outputs: new tensors, its own inputs where it returns them, ints and None.

    Raises
    ------
    CaptureError, BuildError: for what cannot be imported or compiled.
    """
    start = time.perf_counter()
    names = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
    target = codegen.make_target(config.target)
    entry = graphs.lay_out(graph, names, dims or {}, {}).entry
    key = cache.key(
        {
            "graph": _text(graph),
            "operators": custom.identity([n.target for n in graph.graph.nodes]),
            "dims": repr(sorted((dims or {}).items())),
            "config": config.to_json(only_code=True),
            "target": codegen.describe(target),
            "versions": versions.versions(),
            "compiler": versions.source_hash(),
            "templates": registry.identity(),
            "records": [] if config.tune == "none" else stamp(open_stores(config, target)),
        }
    )

    def make(path: Path) -> None:
        configure_threads()
        trace = pipeline.Trace()
        read = graphs.read(graph, names, dims or {}, {})
        stores = open_stores(config, target)
        planned = chain.planned(read.mod, config, target, stores, trace)
        executable = lower.lower(entries.add(planned, target), target)
        signature = read.entry.signature
        manifest = chain.manifest([planned], signature, config, target, trace, key, start)
        export.write(executable, path, manifest, None)

    path = cache.store(key, make, config.cache_dir)
    kind = target.kind.name
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else None
    executor = Executor(path, device=0 if device is None else device.index)
    return GraphCall(executor, entry, device or torch.device("cpu"))


def _text(graph: fx.GraphModule) -> list[Any]:
    """Say all that decides what a graph computes."""
    values: Sequence[Any] = [
        (str(n.meta.get("val")), str(n.meta["val"].dtype) if _is_tensor(n) else "")
        for n in graph.graph.nodes
        if n.op == "placeholder"
    ]
    return [str(graph.graph), [list(v) for v in values]]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
