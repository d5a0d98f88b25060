"""Which line of the user's code an operator or an error comes from."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import traceback
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import PythonKeyTracer

_HIDDEN = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


def _is_user(filename: str) -> bool:
    return not filename.startswith(_HIDDEN) and not filename.startswith("<") and "/contextlib.py" not in filename


def _line(filename: str, number: int) -> str:
    code = linecache.getline(filename, number).strip()
    return f"{filename}:{number}: {code}" if code else f"{filename}:{number}"


def of_node(node: fx.Node) -> str:
    """Return ``file:line: code`` of the user's innermost frame of ``node``, or ``""`` where it is unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    users = [frame for frame in frames if _is_user(frame[0])]
    if not (users or frames):
        return ""
    filename, number = (users or frames)[-1]
    return _line(filename, int(number))


def of_error(tb: TracebackType | None) -> str:
    """Return ``file:line: code`` of the user's innermost frame of a traceback, or ``""``."""
    users = [frame for frame in traceback.extract_tb(tb) if _is_user(frame.filename)]
    if not users:
        return ""
    return _line(users[-1].filename, users[-1].lineno or 0)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Make torch.export keep the user's frames of plain functions too; it keeps those named ``forward`` alone."""

    def keep(_: PythonKeyTracer, frames: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([f for f in frames if _is_user(f.filename)][-8:])

    inherited = "_filter_traceback_frames" not in vars(PythonKeyTracer)
    before = getattr(PythonKeyTracer, "_filter_traceback_frames", None)
    if before is None or not inherited:  # another torch: lines of plain functions stay unknown
        yield
        return
    PythonKeyTracer._filter_traceback_frames = keep  # type: ignore[method-assign]
    try:
        yield
    finally:
        del PythonKeyTracer._filter_traceback_frames
