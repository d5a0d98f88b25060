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

_HERE = os.path.dirname(os.path.dirname(__file__))
_WATCHER = os.path.join(os.path.dirname(__file__), "memory.py")
_HIDDEN = (os.path.dirname(torch.__file__), _HERE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


def _is_user(filename: str) -> bool:
    return (
        not filename.startswith(_HIDDEN)
        and not filename.startswith("<")
        and "/contextlib.py" not in filename
    )


def _is_caller(filename: str) -> bool:
    """Whether code of this package called the user's, and was not called by it."""
    return filename.startswith(_HERE) and filename != _WATCHER


def _line(filename: str, number: int) -> str:
    code = linecache.getline(filename, number).strip()
    return f"{filename}:{number}: {code}" if code else f"{filename}:{number}"


def of_node(node: fx.Node) -> str:
    """Return ``file:line: code`` of the user's innermost frame; else the layer of ``node``.

    Else ``""``.
    """
    frames = [
        frame for frame in _FRAME.findall(node.meta.get("stack_trace") or "") if _is_user(frame[0])
    ]
    if frames:
        return _line(frames[-1][0], int(frames[-1][1]))
    layers = list((node.meta.get("nn_module_stack") or {}).values())
    if not layers:
        return ""
    path, kind = layers[-1]
    if not path.startswith("fn"):
        return ""
    name = getattr(kind, "__name__", str(kind).rpartition(".")[2])
    return f"layer {path.removeprefix('fn').lstrip('.') or 'forward'} ({name})"


def of_error(tb: TracebackType | None) -> str:
    """Return ``file:line: code`` of the user's innermost frame of a traceback, or ``""``."""
    frames = _inside([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(tb)])
    users = [frame for frame in frames if _is_user(frame[0])]
    return _line(*users[-1]) if users else ""


def here() -> str:
    """Return ``file:line: code`` of the user's innermost frame that is running, or ``""``."""
    frames = [(f.f_code.co_filename, number) for f, number in traceback.walk_stack(None)][::-1]
    while frames and frames[-1][0].startswith(_HERE):  # this package's, called by the user's
        frames.pop()
    users = [frame for frame in _inside(frames) if _is_user(frame[0])]
    return _line(*users[-1]) if users else ""


def _inside(frames: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Drop the frames of whoever called capture: those up to this package's own last frame."""
    own = [i for i, frame in enumerate(frames) if _is_caller(frame[0])]
    return frames[own[-1] + 1 :] if own else frames


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Make torch.export keep the user's frames of plain functions too.

    It keeps those named ``forward`` alone.
    """

    def keep(_: PythonKeyTracer, frames: traceback.StackSummary) -> traceback.StackSummary:
        own = [i for i, frame in enumerate(frames) if _is_caller(frame.filename)]
        inside = frames[own[-1] + 1 :] if own else frames
        return traceback.StackSummary.from_list([f for f in inside if _is_user(f.filename)][-8:])

    inherited = "_filter_traceback_frames" not in vars(PythonKeyTracer)
    before = getattr(PythonKeyTracer, "_filter_traceback_frames", None)
    if before is None or not inherited:  # another torch: lines of plain functions stay unknown
        yield
        return
    PythonKeyTracer._filter_traceback_frames = keep
    try:
        yield
    finally:
        del PythonKeyTracer._filter_traceback_frames


def first_line(error: Exception) -> str:
    """Return the first line of an error's text that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:400]
