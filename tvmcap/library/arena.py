"""Arena: `main` once more, with the storage of its intermediates as arguments.

`main` allocates at every call, which suits a caller of TVM's runtime alone. The executor calls
`main_in_arena` with storage that it has made once, by `make_arena`, large enough for every call.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx
from tvm.sym import Analyzer

from tvmcap.base.signature import Size
from tvmcap.graph.rewrite import is_op
from tvmcap.library.storage import size_text

MAKE, ENTRY = "make_arena", "main_in_arena"
"""Names of the two functions; `runtime.arena` calls them."""


def add(mod: tvm.IRModule) -> tvm.IRModule:
    """Ensures each entry of a planned module that has intermediates also has its two functions.

    Those of ``main`` are ``ENTRY`` and ``MAKE``, those of another entry ``NAME_in_arena`` and
    ``make_NAME_arena``. The first takes the entry's parameters and one storage for each that it
    allocates; the second takes the bytes of each, as one shape, and returns them.
    """
    functions = dict(mod.functions.items())
    for gvar, main in mod.functions.items():
        if not isinstance(main, relax.Function) or not storages(main):
            continue
        allocations = storages(main)
        held = {b.var for b in allocations}
        blocks = [
            relax.BindingBlock([b for b in block.bindings if getattr(b, "var", None) not in held])
            for block in main.body.blocks
        ]
        entry = relax.Function(
            [*main.params, *(b.var for b in allocations)],
            relax.SeqExpr(blocks, main.body.body),
            main.ret_ty,
            main.is_pure,
            main.attrs,
        )
        make, name = names(gvar.name_hint)
        functions[tvm.ir.GlobalVar(name)] = relax.utils.copy_with_new_vars(entry)
        functions[tvm.ir.GlobalVar(make)] = _make(len(allocations))
    return tvm.IRModule(functions, attrs=mod.attrs)


def names(entry: str) -> tuple[str, str]:
    """Name what makes the arena of an entry, and the entry that takes it."""
    return (MAKE, ENTRY) if entry == "main" else (f"make_{entry}_arena", f"{entry}_in_arena")


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


def _make(count: int) -> Any:
    """Return a function from the bytes of ``count`` storages to the storages."""
    sizes = [tirx.Var(f"bytes{i}", "int64") for i in range(count)]
    builder = relax.BlockBuilder()
    shape = relax.Var("sizes", relax.ShapeType(sizes))
    with builder.function(MAKE, [shape], attrs={"relax.force_pure": True}, private=False):
        made = [
            builder.emit(
                relax.op.memory.alloc_storage(relax.ShapeExpr([size]), 0, "global", "uint8")
            )
            for size in sizes
        ]
        builder.emit_func_output(relax.Tuple(made))
    return builder.finalize()[MAKE].without_attr("global_symbol")
