"""Elementwise arithmetic on the GPU: what TIRx does not lower, and quick forms for 16-bit results.

Quick forms rest on ex2.approx and rcp.approx, special-function instructions whose relative error is
below 2^-22 (PTX ISA 9.0), far below the rounding of the result. tanhf, erff and division, exact to
one or two ulp, take several times as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

Expr = Any

_HALF = ("float16", "bfloat16")
_LOG2_E = 1.0 / math.log(2)
_ROOT_HALF = math.sqrt(0.5)

_EX2 = (
    "__forceinline__ __device__ float tvmcap_ex2(float x)"
    '{ float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }'
)
_LOGISTIC = (
    "__forceinline__ __device__ float tvmcap_logistic2(float x)"  # 1 / (1 + 2^x)
    '{ float e, r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));'
    '  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e)); return r; }'
)
# The same without rcp: a guess from the bits, then a step of third and one of second order, which
# leave 2^-23. Special functions are a quarter as many a cycle as products.
_LOGISTIC_PRODUCTS = (
    "__forceinline__ __device__ float tvmcap_logistic2_products(float x)"
    '{ float e; asm("min.NaN.f32 %0, %1, 0f42C80000;" : "=f"(e) : "f"(x));'  # at most 100
    '  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(e)); e += 1.0f;'
    "  float r = __int_as_float(0x7ef31000 - __float_as_int(e)), d = fmaf(-e, r, 1.0f);"
    "  r = fmaf(r, fmaf(d, d, d), r); return fmaf(r, fmaf(-e, r, 1.0f), r); }"
)
# x * Phi(x) with the normal distribution Phi, as max(x, 0) - |x| * Phi(-|x|). The polynomial is
# log2(Phi(-t)), fitted to the least largest error of t * Phi(-t): 4e-6 everywhere, relative 4e-5 up
# to t = 3 and 5e-4 up to t = 4; its first coefficient is negative, so that far tails vanish.
_GELU = (
    "__forceinline__ __device__ float tvmcap_gelu(float x)"
    "{ float t = fabsf(x), e, q = -4.02158011e-4f;"
    "  q = fmaf(q, t, 6.56022178e-3f); q = fmaf(q, t, -5.05036972e-2f);"
    "  q = fmaf(q, t, -0.461322755f); q = fmaf(q, t, -1.15033841f);"
    "  q = fmaf(q, t, -1.00005662f);"
    '  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(q));'
    "  return fmaf(-fminf(t, 3e38f), e, fmaxf(x, 0.0f)); }"  # an infinite t has e = 0
)
_DIVIDE = (
    "__forceinline__ __device__ float tvmcap_divide(float x, float y)"  # two ulp, any size
    '{ float z; asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z; }'
)
_POWER = (
    "__forceinline__ __device__ float tvmcap_power{n}(float x)"
    "{{ float s = x * x; return {product}; }}"
)
_PRODUCTS = {2.0: "s", 3.0: "s * x", 4.0: "s * s"}
_EXTREME = (
    "__forceinline__ __device__ float tvmcap_{name}(float x, float y)\n"
    "{{ float z;\n#if __CUDA_ARCH__ >= 800\n"
    '  asm("{name}.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));\n#else\n'
    "  z = x {sign} y || x != x ? x : y;\n#endif\n  return z; }}"
)

#: Functions of float32 that have no 16-bit form, or one that TIRx does not know.
_FLOATS = frozenset(
    "tirx." + name
    for name in (
        "exp exp2 exp10 erf tanh sigmoid log log2 log10 log1p tan cos cosh acos acosh sin sinh"
        " asin asinh atan atanh atan2 sqrt rsqrt pow fmod hypot copysign nearbyint isnan isinf"
        " isfinite"
    ).split()
)


def legal(value: Expr) -> Expr:
    """Write what TIRx does not lower in terms of what it does.

    Functions of 16-bit values go through float32, small powers are products, and a maximum or
    minimum keeps a NaN, as in PyTorch.
    """
    forms = ((tvm.ir.Call, _lowered), ((tirx.Max, tirx.Min), _extreme), (tirx.Cast, _widened))
    return tvm_ffi.structural_map(value, forms)


def quick(value: Expr) -> Expr:
    """Replace slow float32 functions; numbers that multiply or add to the same value are merged."""
    forms = (((tirx.Add, tirx.Sub, tirx.Mul, tirx.Div), _arithmetic), (tvm.ir.Call, _function))
    return tvm_ffi.structural_map(value, forms)


def balanced(value: Expr) -> Expr:
    """Take every other special function out of quick forms: for one of two neighbouring columns."""

    def products(call: Any) -> Expr:
        if getattr(call.args[0] if call.args else None, "value", None) != "tvmcap_logistic2":
            return call
        return _device("tvmcap_logistic2_products", _LOGISTIC_PRODUCTS, call.args[1])

    return tvm_ffi.structural_map(value, (tvm.ir.Call, products))


def _lowered(call: Any) -> Expr:
    name, dtype = getattr(call.op, "name", ""), str(call.ty)
    if name == "prim.likely":
        return call.args[0]
    if name == "tirx.popcount":
        bits = str(call.args[0].ty)
        source = "__popcll" if bits.endswith("64") else "__popc"
        return tirx.Cast(dtype, tirx.call_pure_extern("int32", source, call.args[0]))
    exponent = getattr(call.args[1], "value", None) if name == "tirx.pow" else None
    if dtype == "float32" and exponent in _PRODUCTS:
        source = _POWER.format(n=int(exponent), product=_PRODUCTS[exponent])
        return _device(f"tvmcap_power{int(exponent)}", source, call.args[0])
    if name not in _FLOATS or not any(str(a.ty) in _HALF for a in call.args):
        return call
    args = [tirx.Cast("float32", a) if str(a.ty) in _HALF else a for a in call.args]
    if dtype not in _HALF:
        return tirx.call_intrin(dtype, call.op, *args)
    return tirx.Cast(dtype, tirx.call_intrin("float32", call.op, *args))


def _widened(cast: Any) -> Expr:
    """Take the two casts off a float32 made of the bits of a bfloat16."""
    source: Any = getattr(cast.value, "value", None)
    if getattr(getattr(source, "op", None), "name", "") != "tirx.reinterpret":
        return cast
    dtypes = [str(e.ty) for e in (cast, cast.value, source)]
    return source if dtypes == ["float32", "bfloat16", "float32"] else cast


def _extreme(node: Any) -> Expr:
    dtype = str(node.ty)
    if dtype in _HALF:
        wide = [tirx.Cast("float32", x) for x in (node.a, node.b)]
        return tirx.Cast(dtype, _extreme(type(node)(*wide)))
    if dtype != "float32":
        return node
    name, sign = ("max", ">") if isinstance(node, tirx.Max) else ("min", "<")
    source = _EXTREME.format(name=name, sign=sign)
    return _device(f"tvmcap_{name}", source, node.a, node.b)


@dataclass(frozen=True)
class _Affine:
    """``scale * base + offset``; without a base, the number ``offset``."""

    scale: float
    base: Expr
    offset: float

    def times(self, factor: float) -> _Affine:
        """Return ``factor`` times this."""
        return _Affine(self.scale * factor, self.base, self.offset * factor)

    def plus(self, number: float) -> _Affine:
        """Return this and a number."""
        return _Affine(self.scale, self.base, self.offset + number)

    @property
    def is_mild(self) -> bool:
        """Whether its numbers are so ordinary that merging them loses nothing."""
        return 2.0**-40 < abs(self.scale) < 2.0**40 and abs(self.offset) <= 2.0**10

    def expr(self) -> Expr:
        """Write it out."""
        if self.base is None:
            return _number(self.offset)
        if _close(self.scale, -1.0) and self.offset:
            return _number(self.offset) - self.base
        result = self.base if _close(self.scale, 1.0) else _scaled(self.base, self.scale)
        return result + _number(self.offset) if self.offset else result


def _scaled(value: Expr, factor: float) -> Expr:
    """Multiply by a number, for nothing where a factor of a product has numbers of its own."""
    if isinstance(value, tirx.Mul):
        for other, total in ((value.a, value.b), (value.b, value.a)):
            found = _affine(total).times(factor)
            if found.offset and found.is_mild:
                return other * found.expr()
    return value * _number(factor)


def _affine(value: Expr) -> _Affine:
    """Take the numbers off an expression whose parts are in this form already."""
    if isinstance(value, tirx.FloatImm):
        return _Affine(1.0, None, value.value)
    whole = _Affine(1.0, value, 0.0)
    if not isinstance(value, tirx.Add | tirx.Sub | tirx.Mul | tirx.Div):
        return whole
    a, b = value.a, value.b
    left, right = isinstance(a, tirx.FloatImm), isinstance(b, tirx.FloatImm)
    if isinstance(value, tirx.Div):
        found = _affine(a).times(1.0 / b.value) if right and b.value else whole
    elif not left and not right:
        return whole
    elif isinstance(value, tirx.Mul):
        found = _affine(b).times(a.value) if left else _affine(a).times(b.value)
    elif isinstance(value, tirx.Add):
        found = _affine(b).plus(a.value) if left else _affine(a).plus(b.value)
    else:
        found = _affine(b).times(-1.0).plus(a.value) if left else _affine(a).plus(-b.value)
    return found if found.is_mild else whole


def _arithmetic(node: Any) -> Expr:
    if str(node.ty) != "float32":
        return node
    found = _affine(node)
    if found.base is None or not node.same_as(found.base):
        return found.expr()
    if isinstance(node, tirx.Mul):
        return _product(_affine(node.a), _affine(node.b), node)
    if isinstance(node, tirx.Div) and not isinstance(node.b, tirx.FloatImm):
        return _device("tvmcap_divide", _DIVIDE, node.a, node.b)
    return node


def _product(a: _Affine, b: _Affine, node: Any) -> Expr:
    """Multiply: numbers go where they cost nothing."""
    if a.base is None or b.base is None:
        return node
    gelu = _gelu(a, b) or _gelu(b, a)
    if gelu is not None:
        return gelu.expr()
    if not a.offset and not b.offset:
        merged = _Affine(a.scale * b.scale, a.base * b.base, 0.0)
    elif not a.offset or not b.offset:
        factor, total = (a, b) if not a.offset else (b, a)
        scaled = total.times(factor.scale)
        if not scaled.is_mild:
            return node
        merged = _Affine(1.0, factor.base * scaled.expr(), 0.0)
    else:
        return node
    return merged.expr() if merged.is_mild else node


def _gelu(x: _Affine, gate: _Affine) -> _Affine | None:
    """Match ``x * c * (1 + erf(x / sqrt(2)))``, which is ``2 c`` times the GELU of x."""
    if x.offset or getattr(getattr(gate.base, "op", None), "name", "") != "tirx.erf":
        return None
    inner = _affine(gate.base.args[0])
    same = not inner.offset and tvm_ffi.structural_equal(inner.base, x.base)
    if not same or not _close(inner.scale, _ROOT_HALF) or not _close(gate.offset, gate.scale):
        return None
    return _Affine(2.0 * gate.scale * x.scale, _device("tvmcap_gelu", _GELU, x.base), 0.0)


def _function(call: Any) -> Expr:
    name = getattr(call.op, "name", "")
    if str(call.ty) != "float32" or name not in ("tirx.tanh", "tirx.sigmoid", "tirx.exp"):
        return call
    argument = _affine(call.args[0])
    if name == "tirx.exp":
        return _device("tvmcap_ex2", _EX2, argument.times(_LOG2_E).expr())
    # tanh(u) = 2 / (1 + e^-2u) - 1
    power = argument.times(-2.0 * _LOG2_E if name == "tirx.tanh" else -_LOG2_E)
    logistic = _device("tvmcap_logistic2", _LOGISTIC, power.expr())
    return _Affine(2.0, logistic, -1.0).expr() if name == "tirx.tanh" else logistic


def _device(name: str, source: str, *args: Expr) -> Expr:
    return T.cuda.func_call(name, *args, source_code=source, return_type="float32")


def _number(value: float) -> Expr:
    return tirx.FloatImm("float32", value)


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)
