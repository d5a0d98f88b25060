"""TVM's objects as text: what `tvm.ir.save_json` writes, read by the TVM that wrote it."""

from __future__ import annotations

from typing import Any


def parse(text: str) -> Any:
    """Return the object that this TVM's `tvm.ir.save_json` wrote as ``text``.

    `tvm.ir.load_json` first rewrites what older TVMs wrote, in Python, which takes it five times as
    long.
    """
    from tvm_ffi.serialization import from_json_graph_str

    return from_json_graph_str(text)
