"""What the command line writes: tables or JSON to stdout, what goes on to stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console

#: Columns of a table that goes to a file or a pipe.
_WIDTH = 110


@contextlib.contextmanager
def status(text: str) -> Iterator[Any]:
    """Show what goes on, on a terminal; yields a function that changes the text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: None
        return
    with console.status(text) as shown:
        yield lambda line: shown.update(line)


def show(as_json: bool, data: Any, table: Callable[[], Any]) -> None:
    """Write ``data`` as JSON, or what ``table()`` returns."""
    if as_json:
        write_json(data)
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(table())


def write(text: str) -> None:
    """Write text that ends with one newline, at once."""
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def write_json(data: Mapping[str, Any] | list[Any]) -> None:
    """Write JSON; what JSON does not know as text."""
    write(json.dumps(data, indent=2, default=str))
