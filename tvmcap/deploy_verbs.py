"""The verbs of the command line that deploy a library."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from tvmcap.base.signature import Signature
from tvmcap.view import arrays
from tvmcap.view.console import write

_OK = 0


def package(args: argparse.Namespace) -> int:
    """Write the folder, and say what is in it."""
    from tvmcap.package import package as run

    folder = run(args.library, args.output, sample=args.sample)
    name = Path(args.library).name
    write(f"written to {folder}; there, ./run {name} sample.safetensors checks it")
    return _OK


def serve(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from tvmcap.compiled import load
    from tvmcap.runtime.serve import ServeOptions
    from tvmcap.runtime.serve import serve as run
    from tvmcap.runtime.serving.library import Sample

    def sample(signature: Signature) -> Sample:
        if args.sample is None:
            return Sample(tuple(arrays.draw(signature, {}, seed=0)))
        inputs, outputs = arrays.read_sample(args.sample, signature)
        return Sample(tuple(inputs), outputs)

    path = Path(args.library)
    given = {f.name: getattr(args, f.name) for f in fields(ServeOptions)}
    options = ServeOptions(
        **{"name": path.stem, **{name: v for name, v in given.items() if v is not None}}
    )
    run(
        path,
        options,
        load=load,
        sample=sample,
        swaps=args.sample is not None,
        started=lambda url: write(f"serving {options.name} at {url}"),
    )
    return _OK
