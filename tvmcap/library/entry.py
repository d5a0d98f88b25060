"""Entry: each function of a library once more, as one host function that the executor calls.

`main` runs on TVM's virtual machine and allocates at every call, which suits a caller of TVM's
runtime alone, and shows each kernel to those that watch. `main_in_arena` is native code that
launches the same kernels on memory that its caller holds, and takes a tenth of the machine's time.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from tvmcap.base.errors import ContractError
from tvmcap.graph.rewrite import is_op
from tvmcap.library import weights
from tvmcap.library.arena import storages

#: DLPack's numbers of device types (dlpack.h), by kind of target.
_DEVICE_TYPES = {"llvm": 1, "cuda": 2}
_ALIGNMENT = 16
#: What a symbol of TVM's starts with (TVM_FFI_SYMBOL_PREFIX in tvm/ffi/c_api.h): a kernel compiled
#: apart is found by it when the library is linked.
_SYMBOL = "__tvm_ffi_"
_TOO_SMALL = "a storage for intermediates holds fewer bytes than the sizes of the call need"


def names(entry: str) -> tuple[str, str]:
    """Name the host function of an entry, and the function that returns its constants."""
    return f"{entry}_in_arena", f"{entry}_constants"


def add(mod: tvm.IRModule, target: Any) -> tvm.IRModule:
    """Ensures each planned entry also has its host function, for a target.

    It takes what the entry takes, then its constants, a uint8 tensor for each storage that the
    entry allocates, and the index of the device. It fails before the first kernel where a storage
    is too small. Constants are returned by a function of their own.
    """
    functions = dict(mod.functions.items())
    entries = {g.name_hint: f for g, f in functions.items() if isinstance(f, relax.Function)}
    declared: set[str] = set()
    for entry, main in sorted(entries.items()):  # the order in which code is generated
        name, constants = names(entry)
        host = _HostFunction(main, target.kind.name, declared).made(name)
        functions[tvm.ir.GlobalVar(name)] = _lowered(host)
        functions[tvm.ir.GlobalVar(constants)] = _returning(weights.constants(main))
    return tvm.IRModule(functions, attrs=mod.attrs)


def _lowered(func: Any) -> Any:
    """Spell out calls and tensors: the passes after this one take bfloat16 for another dtype.

    TVM does so for the functions of a host alone, which are told by their target.
    """
    lower = tirx.transform.LowerTVMBuiltin()
    on_host = func.with_attr("target", tvm.target.Target("llvm"))
    return lower(tvm.IRModule({"main": on_host}))["main"].without_attr("target")


def _expecting(condition: Any, message: str) -> Any:
    text = tvm.ir.StringImm
    return tirx.AssertStmt(condition, text("RuntimeError"), [text(message)])


def _returning(constants: list[Any]) -> Any:
    builder = relax.BlockBuilder()
    with builder.function("main", [], attrs={"relax.force_pure": True}, private=False):
        builder.emit_func_output(relax.Tuple(constants))
    return builder.finalize()["main"].without_attr("global_symbol")


class _HostFunction:
    """Writes one entry as a host function: an expression for each tensor, a call for each kernel.

    Attributes
    ----------
    tensors: variable or constant of the entry -> the tensor that a kernel takes for it.
    data: the same -> where its elements lie.
    declared: kernels compiled apart that the library's host functions name so far.
    """

    def __init__(self, main: Any, kind: str, declared: set[str]) -> None:
        self.main = main
        self.device = tirx.Var("device", "int32")
        self.device_type = _DEVICE_TYPES[kind]
        self.tensors: dict[Any, Any] = {}
        self.data: dict[Any, Any] = {}
        self.params: list[Any] = []
        self.declared = declared

    def made(self, name: str) -> Any:
        """Return the function."""
        for i, var in enumerate(self.main.params):
            self._take(var, f"arg{i}", list(var.ty.shape.values), str(var.ty.dtype.dtype))
        for i, constant in enumerate(weights.constants(self.main)):
            shape = [int(n) for n in constant.value.shape]
            self._take(constant, f"constant{i}", shape, str(constant.value.dtype))
        checks = []
        for i, binding in enumerate(storages(self.main)):
            held = tirx.Var(f"bytes{i}", "int64")
            self._take(binding.var, f"storage{i}", [held], "uint8")
            checks.append(_expecting(held >= binding.value.args[0].values[0], _TOO_SMALL))
        nothing = tvm.ir.StringImm("")
        body = tirx.stmt_seq(*checks, self._sequence(self.main.body))
        body = tirx.AttrStmt(nothing, "device_type", tirx.const(self.device_type, "int32"), body)
        body = tirx.AttrStmt(nothing, "device_id", self.device, body)
        attrs = {"global_symbol": name, "s_tir": True}
        return tirx.PrimFunc([*self.params, self.device], body).with_attrs(attrs)

    def _take(self, var: Any, name: str, shape: list[Any], dtype: str) -> None:
        buffer = tirx.decl_buffer(
            shape, dtype, name, data_alignment=_ALIGNMENT, offset_factor=1, elem_offset=0
        )
        self.params.append(buffer)
        self.tensors[var], self.data[var] = buffer, buffer.data

    def _sequence(self, body: Any) -> Any:
        statements = [
            statement
            for block in body.blocks
            for binding in block.bindings
            if (statement := self._statement(binding.var, binding.value)) is not None
        ]
        return tirx.stmt_seq(*statements) if statements else tirx.Evaluate(0)

    def _statement(self, var: Any, value: Any) -> Any:
        """Return what a binding does, None where it only names a tensor, a number or nothing."""
        if isinstance(value, relax.If):
            cond = self.tensors.get(value.cond, value.cond)
            branches = (self._sequence(b) for b in (value.true_branch, value.false_branch))
            return tirx.IfThenElse(cond, *branches)
        callee = getattr(value, "op", None)
        if isinstance(callee, relax.ExternFunc):
            return self._call(self._symbol(str(callee.global_symbol)), value.args)
        if isinstance(callee, tvm.ir.GlobalVar):
            return self._call(callee.name_hint, value.args)
        if is_op(value, "memory.alloc_tensor") or is_op(value, "reshape"):
            self._view(var, value.args[0])
        elif not is_op(value, "memory.alloc_storage"):
            self._name(var, value)
        return None

    def _name(self, var: Any, value: Any) -> None:
        """Let a variable stand for a tensor, a number, or the nothing that kernels return."""
        if value in self.data:
            self.tensors[var], self.data[var] = self.tensors[value], self.data[value]
        elif isinstance(value.ty, tvm.ir.PrimType):
            self.tensors[var] = self.tensors.get(value, value)
        elif not isinstance(value, relax.Tuple) or value.fields:
            raise ContractError(f"entry: {var.name} is bound to what is no kernel: {value}")

    def _symbol(self, kernel: str) -> str:
        """Name a kernel that is compiled apart: TVM declares a symbol each time it is named whole.

        A second declaration gets another name, which nothing defines.
        """
        if kernel in self.declared:
            return kernel
        self.declared.add(kernel)
        return _SYMBOL + kernel

    def _call(self, name: str, args: Any) -> Any:
        passed = [self.tensors.get(arg, arg) for arg in args]
        return tirx.Evaluate(tirx.call_cpacked(name, *passed))

    def _view(self, var: Any, source: Any) -> None:
        shape, data = var.ty.shape.values, self.data[source]
        none = tirx.reinterpret("handle", tirx.const(0, "uint64"))
        self.data[var] = data
        self.tensors[var] = tirx.tvm_stack_make_array(
            data,
            tirx.tvm_stack_make_shape(*shape),
            none,
            len(shape),
            str(var.ty.dtype.dtype),
            tirx.const(0, "int64"),
        )
