"""The options of the verbs that deploy a library."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

_SAMPLE = "inputs by argument and outputs (out0 ...), .npz or .safetensors: tvmcap run writes one"


def add_verbs(verbs: Any, verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Add them; ``verb(verbs, name, text)`` makes the parser of one."""
    package = verb(verbs, "package", "gather what a library needs to run without Python")
    package.add_argument("library", metavar="FILE.so")
    package.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="a new or empty folder"
    )
    package.add_argument(
        "--sample", metavar="FILE", help=f"what the folder checks itself on; {_SAMPLE}"
    )
    serve = verb(verbs, "serve", "serve a library over HTTP (Open Inference Protocol v2)")
    serve.add_argument("library", metavar="FILE.so")
    option = serve.add_argument
    option("--port", type=int, metavar="N", help="default: 8000; 0 is a free one")
    option("--host", help="address to listen at; default: 127.0.0.1, for this machine alone")
    option("--name", help="of the model in URLs; default: the file's name without .so")
    option("--max-batch", type=int, metavar="ROWS", help="rows that run together; default: 32")
    option("--max-delay-ms", type=float, metavar="MS", help="wait for others; default: 2")
    option("--max-queue", type=int, metavar="N", help="requests that may wait; default: 1024")
    option("--max-request-mb", type=float, metavar="MB", help="largest body; default: 64")
    option(
        "--read-timeout-s", type=float, metavar="S",
        help="for a client to send a request, or to read its answer; default: 30",
    )  # fmt: skip
    option("--drain-s", type=float, metavar="S", help="to finish after SIGTERM; default: 30")
    option("--sample", metavar="FILE", help=f"allows hot swaps, each checked on it; {_SAMPLE}")
