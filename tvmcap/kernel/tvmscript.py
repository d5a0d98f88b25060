"""TVMScript, parsed without a search for the source of every frame of the stack.

TVM looks at the stack at each decorator and each macro. The standard library's way to do so goes
through all imported modules for every frame, which takes longer than the rest of the parsing where
torch is among them, and the deeper the stack the more.
"""

from __future__ import annotations

import importlib
import inspect
import linecache
import types
from typing import Any

from tvm.script.parser.core.parser import ScriptMacro

_ASK_FOR_THE_STACK = (
    "tvm.script.parser.ir.entry",
    "tvm.tirx.script.parser.entry",
    "tvm.relax.script.parser.entry",
    "tvm.tirx.script.builder.ir",
)


def quicken() -> None:
    """Let TVM's parsers ask for the stack in a way that is quick."""
    quick = types.SimpleNamespace(**{**vars(inspect), "stack": _stack})
    for name in _ASK_FOR_THE_STACK:
        vars(importlib.import_module(name))["inspect"] = quick
    ScriptMacro._find_parser_def = _parser


def _stack(context: int = 1) -> list[inspect.FrameInfo]:
    """Return the caller's frames as ``inspect.stack`` does, each with its own line of source."""
    frames, frame = [], inspect.currentframe()
    while frame is not None and (frame := frame.f_back) is not None:
        name, number = frame.f_code.co_filename, frame.f_lineno
        line = linecache.getline(name, number, frame.f_globals)
        lines, index = ([line], 0) if line else (None, None)
        frames.append(inspect.FrameInfo(frame, name, number, frame.f_code.co_name, lines, index))
    return frames


def _parser(self: Any) -> Any:
    """Return the innermost parser that is at work: the one that expands a macro."""
    frame = inspect.currentframe()
    while frame is not None:
        parser = frame.f_globals.get(ScriptMacro.parser_object_name)
        if parser is not None:
            return parser
        frame = frame.f_back
    raise RuntimeError(f"no {ScriptMacro.parser_object_name} expands this macro")
