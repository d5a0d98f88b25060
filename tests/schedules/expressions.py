"""Seeded random epilogues: elementwise expressions of a product, as Relax and in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from tests.schedules.operators import OPS

ROWS, COLUMNS, DEPTH = 37, 136, 72

Array = Any

LEAVES = {
    "product": ("rows", "columns"),
    "residual": ("rows", "columns"),
    "bias": ("columns",),
    "column": (1, "columns"),
    "row": ("rows", 1),
}


@dataclass
class Node:
    """One value: its operator, what it is made of, and its value by NumPy in two precisions.

    ``near`` is how near an element has come to a discontinuity on its way.
    """

    name: str
    args: tuple[Node, ...]
    exact: Array
    single: Array
    near: Array
    depth: int = 0

    @property
    def error(self) -> float:
        """Largest error of float32, on elements that jumps leave alone."""
        away = np.broadcast_to(self.near > MARGIN, self.exact.shape)
        wrong = np.abs(self.exact - self.single)[away]
        return float(wrong.max()) if wrong.size else np.inf


MARGIN = 2e-3
OUTPUTS = ("float32", "bfloat16", "float16")


def inputs(seed: int) -> dict[str, Array]:
    """Return float64 values of every leaf but the product, and of its two factors."""
    rng = np.random.default_rng([seed, 1])
    sizes = {"rows": ROWS, "columns": COLUMNS, 1: 1}
    found = {
        name: rng.uniform(-2, 2, [sizes[e] for e in shape]).astype(np.float32).astype(np.float64)
        for name, shape in LEAVES.items()
        if name != "product"
    }
    # multiples of 1/8, exact in 16 bits, and so are their products
    factors = {"x": (ROWS, DEPTH), "w": (DEPTH, COLUMNS)}
    return found | {k: rng.integers(-4, 5, s) / 8 for k, s in factors.items()}


@dataclass
class Epilogue:
    """A generated epilogue: its outputs with their dtypes, and the leaves' values."""

    outputs: list[tuple[Node, str]]
    values: dict[str, Array]

    @property
    def leaves(self) -> list[str]:
        """Parameters that the outputs read besides the product."""
        used = {name for node, _ in self.outputs for name in names(node)}
        return [n for n in LEAVES if n in used and n != "product"]


def generate(seed: int, depth: int = 8) -> Epilogue:
    """Draw two outputs that every rounding of float32 changes little.

    Operators come from a shuffled deck that the next seed goes on with.
    """
    rng = np.random.default_rng([seed, 2])
    values = inputs(seed)
    product = values["x"] @ values["w"]
    nodes = [_leaf(n, product if n == "product" else values[n]) for n in LEAVES]
    deck = [str(n) for n in np.random.default_rng(5).permutation(list(OPS))]
    deck = deck[seed * depth % len(deck) :] + deck[: seed * depth % len(deck)]
    first = nodes[0]
    while first.depth < depth:
        first = _grown(rng, first, nodes, deck)
    inner = [n for n in nodes if n.depth in range(1, depth)]
    second = _grown(rng, inner[int(rng.integers(0, len(inner)))], nodes, deck)
    dtypes = [OUTPUTS[int(i)] for i in rng.integers(0, len(OUTPUTS), 2)]
    return Epilogue(list(zip((first, second), dtypes, strict=True)), values)


def _leaf(name: str, value: Array) -> Node:
    return Node(name, (), value, value.astype(np.float32), np.full(value.shape, np.inf))


def _grown(rng: Any, root: Node, nodes: list[Node], deck: list[str]) -> Node:
    """Apply the deck's next operator that suits to a value and random others."""
    for name in list(deck) * 3:
        others = [nodes[int(i)] for i in rng.integers(0, len(nodes), OPS[name].arity - 1)]
        args = rng.permutation(np.array([root, *others], dtype=object)).tolist()
        node = _apply(name, tuple(args))
        away = np.broadcast_to(node.near > MARGIN, node.exact.shape).mean()
        tame = np.isfinite(node.exact).all() and np.abs(node.exact).max() < 50
        if tame and away > 0.8 and node.error < 2e-5 and np.ptp(node.exact) > 0.1:
            deck.append(deck.pop(deck.index(name)))
            nodes.append(node)
            return node
    raise AssertionError(f"no operator suits {describe(root)}")


def _apply(name: str, args: tuple[Node, ...]) -> Node:
    op = OPS[name]
    with np.errstate(all="ignore"):
        exact = op.numpy(*(a.exact for a in args))
        single = op.numpy(*(a.single for a in args)).astype(np.float32)
        near = args[0].near
        for a in args[1:]:
            near = np.minimum(near, a.near)
        if op.jump is not None:
            near = np.minimum(near, op.jump(*(a.exact for a in args)))
    depth = 1 + max(a.depth for a in args)
    return Node(name, args, exact, single, near, depth)


def names(node: Node) -> set[str]:
    """Operators and leaves of an expression."""
    return {node.name}.union(*(names(a) for a in node.args))


def build(builder: Any, epilogue: Epilogue, values: dict[str, Any]) -> list[Any]:
    """Emit the epilogue over Relax values of the leaves, one kernel an operator."""
    known: dict[int, Any] = {}

    def emitted(node: Node) -> Any:
        if not node.args:
            return values[node.name]
        if id(node) not in known:
            args = [emitted(a) for a in node.args]
            known[id(node)] = builder.emit_te(
                _elementwise(OPS[node.name].tir), *args, primfunc_name_hint=node.name
            )
        return known[id(node)]

    return [builder.emit(relax.op.astype(emitted(n), d)) for n, d in epilogue.outputs]


def _elementwise(function: Callable[..., Any]) -> Callable[..., te.Tensor]:
    def compute(*tensors: te.Tensor) -> te.Tensor:
        rank = max(len(t.shape) for t in tensors)
        padded = [[1] * (rank - len(t.shape)) + list(t.shape) for t in tensors]
        shape = [next((e for e in es if not _is_one(e)), es[0]) for es in zip(*padded, strict=True)]

        def point(*index: Any) -> Any:
            loads = []
            for t in tensors:
                own = index[rank - len(t.shape) :]
                loads.append(
                    t(*(0 if _is_one(e) else i for e, i in zip(t.shape, own, strict=True)))
                )
            return function(*loads)

        return te.compute(shape, point, name="elementwise")

    return compute


def _is_one(extent: Any) -> bool:
    return isinstance(extent, int | tirx.IntImm) and int(extent) == 1


def check(epilogue: Epilogue, got: list[Array]) -> None:
    """Compare with float64, but for elements near a discontinuity."""
    for (node, dtype), mine in zip(epilogue.outputs, got, strict=True):
        eps = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-10}[dtype]
        wanted = np.broadcast_to(node.exact, mine.shape)
        close = np.abs(mine - wanted) <= 2e-4 + (eps + 2e-5) * np.abs(wanted)
        ok = close | np.broadcast_to(node.near <= MARGIN, mine.shape)
        assert ok.all(), (node.name, dtype, mine[~ok][:3], wanted[~ok][:3], describe(node))


def describe(node: Node) -> str:
    """Write an expression."""
    return f"{node.name}({', '.join(map(describe, node.args))})" if node.args else node.name
