"""What reshapes and transposes make of a tensor, in terms of the tensor they start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.sym import Analyzer

from tvmcap.graph import rewrite
from tvmcap.graph.rewrite import is_op

VIEWS = ("permute_dims", "reshape", "expand_dims", "squeeze")
"""Relax operators that move no value to another place in the order of its tensor, or only move."""


@dataclass(frozen=True)
class Atom:
    """A dimension of the source, or a factor of one.

    Attributes
    ----------
    place: sorts atoms in the order of memory, the outermost first.
    extent: int or expression, never 1.
    """

    place: tuple[int, ...]
    extent: Any


@dataclass(frozen=True)
class View:
    """A tensor that holds the elements of ``source``: each of its dimensions is some atoms."""

    source: Any
    dims: tuple[tuple[Atom, ...], ...]

    def moved(self) -> bool:
        """Whether the elements stand in another order than in the source."""
        places = [atom.place for dim in self.dims for atom in dim]
        return places != sorted(places)


@dataclass(frozen=True)
class Operand:
    """A matrix, or a batch of them, as it lies in ``source``.

    Attributes
    ----------
    batch: the dimensions before the last two.
    rows, columns: the last two dimensions as they lie in memory.
    transposed: whether the product takes them the other way round.
    """

    source: Any
    batch: tuple[tuple[Atom, ...], ...]
    rows: tuple[Atom, ...]
    columns: tuple[Atom, ...]
    transposed: bool

    @staticmethod
    def of(*seen: View) -> Operand:
        """Read an operand by the first view in which at most its last two dimensions are swapped.

        The last view must be of the operand itself.
        """
        for view in seen:
            *batch, rows, columns = view.dims
            if not view.moved():
                return Operand(view.source, tuple(batch), rows, columns, False)
            if not View(view.source, (*batch, columns, rows)).moved():
                return Operand(view.source, tuple(batch), columns, rows, True)
        raise ValueError("the last view moves elements")

    @property
    def stored(self) -> list[Any]:
        """Shape as it lies in memory, with the dimensions of the batch as they are."""
        return [size(dim) for dim in (*self.batch, self.rows, self.columns)]

    @property
    def batch_extents(self) -> list[Any]:
        """Extents of the batch, dimensions of the source apart."""
        return [atom.extent for dim in self.batch for atom in dim]

    def layout(self, plain: str) -> str:
        """Return the layout's name, ``plain`` where it is not transposed: "mk" or "km"."""
        return plain[::-1] if self.transposed else plain

    def emit(self, builder: Any, shape: Sequence[Any]) -> Any:
        """Return the operand as a tensor of ``shape``."""
        if same_shape(self.source.ty.shape.values, shape):
            return self.source
        return builder.emit(rewrite.reshape(self.source, [as_expr(e) for e in shape]))


def unfolded(a: Operand, b: Operand) -> tuple[list[Any], list[Any]] | None:
    """Return shapes of a product's operands that keep their sources' dimensions apart, or None.

    Batches of 1 disappear. None where one operand has a part of the other's batch.
    """
    left, right = a.batch_extents, b.batch_extents
    if left and right and not _same_batch(a.batch, b.batch):
        return None
    rows = [] if a.transposed else [atom.extent for atom in a.rows]
    tail = [size(b.rows), size(b.columns)]
    if len(rows) > 1 and (left or not right):
        ones = [1] * (len(rows) - 1) if right else []
        return [*left, *rows, size(a.columns)], [*right, *ones, *tail]
    return [*left, size(a.rows), size(a.columns)], [*right, *tail]


def _same_batch(a: Sequence[tuple[Atom, ...]], b: Sequence[tuple[Atom, ...]]) -> bool:
    """Whether two batches are the same dimensions, none of them broadcast along the other."""
    shapes = ([[atom.extent for atom in dim] for dim in side] for side in (a, b))
    left, right = (shape[next((i for i, e in enumerate(shape) if e), 0) :] for shape in shapes)
    return len(left) == len(right) and all(map(same_shape, left, right))


def whole(tensor: Any) -> View:
    """Return a tensor as a view of itself."""
    extents = [plain(e) for e in tensor.ty.shape.values]
    return View(tensor, tuple(() if e == 1 else (Atom((i,), e),) for i, e in enumerate(extents)))


def apply(view: View, value: Any) -> View | None:
    """Return what a call of one of ``VIEWS`` makes of a view, or None where that cannot be told."""
    if is_op(value, "permute_dims"):
        rank = len(view.dims)
        axes = value.attrs.axes
        order = range(rank)[::-1] if axes is None else [int(a) % rank for a in axes]
        return View(view.source, tuple(view.dims[i] for i in order))
    dims = reshape(view.dims, value.ty.shape.values)
    return None if dims is None else View(view.source, dims)


def reshape(
    dims: Sequence[tuple[Atom, ...]], shape: Sequence[Any]
) -> tuple[tuple[Atom, ...], ...] | None:
    """Distribute the atoms, in their order, over dimensions of ``shape``; None where that fails."""
    atoms = [atom for dim in dims for atom in dim]
    found = []
    for extent in map(plain, shape):
        taken: list[Atom] = []
        while not equal(size(taken), extent):
            if not atoms:
                return None
            atom, have = atoms.pop(0), size(taken)
            if isinstance(extent, int) and isinstance(have, int) and isinstance(atom.extent, int):
                outer = extent // have if have and extent % have == 0 else 0
                if outer and outer < atom.extent and atom.extent % outer == 0:
                    atoms.insert(0, Atom((*atom.place, 1), atom.extent // outer))
                    atom = Atom((*atom.place, 0), outer)
            taken.append(atom)
        found.append(tuple(taken))
    return None if atoms else tuple(found)


def size(atoms: Sequence[Atom]) -> Any:
    """Return the product of their extents."""
    total: Any = 1
    for atom in atoms:
        total = total * atom.extent
    return plain(total)


def equal(a: Any, b: Any) -> bool:
    """Whether two extents are equal at every size of the symbolic dimensions."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(Analyzer().can_prove_equal(as_expr(a), as_expr(b)))


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are equal at every size of the symbolic dimensions."""
    return len(a) == len(b) and all(equal(plain(x), plain(y)) for x, y in zip(a, b, strict=True))


def plain(extent: Any) -> Any:
    """Return a constant as an int."""
    return int(extent) if isinstance(extent, tirx.IntImm) else extent


def as_expr(extent: Any) -> Any:
    """Return an extent as an expression."""
    return tirx.IntImm("int64", extent) if isinstance(extent, int) else extent
