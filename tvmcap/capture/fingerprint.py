"""A key for the compile cache: equal keys mean equal captures, found without tracing.

Code counts by its bytecode (what is loaded, not what the file says by now), data by its content.
What cannot be read, such as an object of an extension module, gets a key of its own, so that it
never matches.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from tvmcap.base.config import Config
from tvmcap.capture import arguments, custom, shapes
from tvmcap.capture.hashing import Walk
from tvmcap.capture.structure import describe


def fingerprint(
    fn: Callable[..., Any] | ExportedProgram | str | os.PathLike[str],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> str:
    """Return a hexadecimal key of everything that decides what ``capture`` finds.

    That is the function's bytecode and what it refers to (recursively in the user's code), weights
    and constants by content, the arguments' structure, dtypes and shapes with dynamic sizes left
    out, and ``config``'s ``dynamic`` and ``constants``. Raises what ``capture`` raises for
    arguments and options that do not fit.
    """
    config = config or Config()
    args, kwargs = arguments.checked(args, kwargs)
    walk = Walk()
    walk.add("versions", sys.version, torch.__version__, str(torch.get_default_dtype()))
    for device in ("cpu", "cuda"):
        walk.add("autocast", str(torch.is_autocast_enabled(device)))
        walk.add(str(torch.get_autocast_dtype(device)))
    walk.add("operators", *custom.identity())
    if isinstance(fn, str | os.PathLike):
        with open(fn, "rb") as file:
            walk.add(
                "file",
                hashlib.file_digest(file, "sha256").hexdigest()
                if hasattr(hashlib, "file_digest")
                else hashlib.sha256(file.read()).hexdigest(),
            )
        return _with_plain_arguments(walk, args, kwargs, config)
    if isinstance(fn, ExportedProgram):
        walk.program(fn)
        return _with_plain_arguments(walk, args, kwargs, config)
    call = arguments.freeze(fn, args or (), kwargs or {}, config.constants)
    walk.visit(fn)
    leaves: list[tuple[str, torch.Tensor]] = []
    trees = [
        describe(value, name, leaves) for name, value in zip(call.names, call.values, strict=True)
    ]
    free = shapes.resolve(config.dynamic, call.names, leaves)
    walk.visit([call.call.names, call.call.keyword, trees])
    for i, (name, tensor) in enumerate(leaves):
        sizes = [free.where.get((i, axis), size) for axis, size in enumerate(tensor.shape)]
        walk.add("leaf", name, str(tensor.dtype), tensor.device.type, repr(sizes))
    walk.add("dims", repr(sorted(free.dims.items())))
    walk.visit(call.frozen)
    return walk.hash.hexdigest()


def _with_plain_arguments(
    walk: Walk, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, config: Config
) -> str:
    """Finish the key of an exported program, whose sizes are its own.

    The arguments matter by their structure.
    """
    if args is not None or kwargs is not None:
        leaves: list[tuple[str, torch.Tensor]] = []
        walk.visit(describe([list(args or ()), dict(kwargs or {})], "", leaves))
        walk.visit([str(tensor.dtype) for _, tensor in leaves])
    walk.add("config", repr(config.dynamic), repr(config.constants))
    return walk.hash.hexdigest()
