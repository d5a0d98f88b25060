"""The verbs of the command line that deploy a library."""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from tvmcap.base.signature import Signature
from tvmcap.view import arrays
from tvmcap.view.console import write

_OK = 0
#: Of the inputs that a library is checked on before it is served.
_ROWS = 16


def package(args: argparse.Namespace) -> int:
    """Write the folder, and say what is in it."""
    from tvmcap.package import package as run

    folder = run(args.library, args.output, sample=args.sample)
    name = Path(args.library).name
    write(f"written to {folder}; there, ./run {name} sample.safetensors checks it")
    return _OK


def draw_rows(signature: Signature) -> tuple[Any, ...]:
    """Draw inputs of several rows, and of three times as many as a call must have."""
    sizes = {
        dim.name: min(max(_ROWS, 3 * dim.min), sys.maxsize if dim.max is None else dim.max)
        for dim in signature.dims
    }
    return tuple(arrays.draw(signature, sizes, seed=0))


def serve(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from tvmcap.compiled import load
    from tvmcap.runtime.serve import ServeOptions
    from tvmcap.runtime.serve import serve as run
    from tvmcap.runtime.serving.library import Sample

    def sample(signature: Signature) -> Sample:
        rows = draw_rows(signature)
        if args.sample is None:
            return Sample(rows)
        inputs, outputs = arrays.read_sample(args.sample, signature)
        return Sample(rows, tuple(inputs), outputs)

    path = Path(args.library)
    given = {f.name: getattr(args, f.name) for f in fields(ServeOptions)}
    options = ServeOptions(
        **{"name": path.stem, **{name: v for name, v in given.items() if v is not None}}
    )

    def started(url: str) -> None:
        # a collection that visits all that is loaded holds every request up for a tenth of a second
        gc.collect()
        gc.freeze()
        write(f"serving {options.name} at {url}")

    run(
        path,
        options,
        load=load,
        sample=sample,
        swaps=args.sample is not None,
        started=started,
    )
    return _OK
