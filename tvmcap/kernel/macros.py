"""TVMScript's macros (``T.inline``), expanded without a look at the source of the whole stack."""

from __future__ import annotations

import inspect
from typing import Any

from tvm.script.parser.core.parser import ScriptMacro


def find_parsers_quickly() -> None:
    """Let macros find the parser that expands them by the stack's frames alone.

    TVM's own search reads the source of every frame, which takes two thirds of the time of writing
    a kernel where torch is imported.
    """
    ScriptMacro._find_parser_def = _parser


def _parser(self: Any) -> Any:
    """Return the innermost parser that is at work."""
    frame = inspect.currentframe()
    while frame is not None:
        parser = frame.f_globals.get(ScriptMacro.parser_object_name)
        if parser is not None:
            return parser
        frame = frame.f_back
    raise RuntimeError(f"no {ScriptMacro.parser_object_name} expands this macro")
