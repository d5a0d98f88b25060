"""Arena: the storage that a planned entry allocates for its intermediates."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.sym import Analyzer

from tvmcap.base.signature import Size
from tvmcap.graph.rewrite import is_op
from tvmcap.library.storage import size_text


def storages(main: Any) -> list[Any]:
    """List the bindings of a planned main that allocate storage, in order."""
    bindings = [b for block in main.body.blocks for b in block.bindings]
    return [b for b in bindings if is_op(b.value, "memory.alloc_storage")]


def sizes(mod: tvm.IRModule) -> tuple[Size, ...]:
    """Return the bytes of each storage that a planned main allocates, in order."""
    found = []
    for binding in storages(mod["main"]):
        size = Analyzer().simplify(binding.value.args[0].values[0])
        found.append(int(size) if isinstance(size, tirx.IntImm) else size_text(size))
    return tuple(found)
