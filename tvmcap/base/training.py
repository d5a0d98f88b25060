"""What a library with a backward entry says of itself, as JSON in its manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tvmcap.base.errors import LibraryError
from tvmcap.base.signature import Signature, Size

DRAWS = (
    "dropout",
    "bernoulli.p",
    "uniform.default",
    "normal_functional.default",
    "rand_like.default",
    "randn_like.default",
    "rand.default",
    "randn.default",
)
"""Random operators that a call runs in PyTorch: ATen's, and dropout's mask."""


@dataclass(frozen=True)
class Port:
    """What stands at one place of a graph's inputs or outputs.

    Attributes
    ----------
    kind: inputs: "tensor" (of the entry, by ``index``), "size" (a number that shapes tell) or
        "sized" (a tensor of the entry that only tells a number). Outputs: "tensor" (of the entry,
        by ``index``), "input" (the graph's input ``index``), "size" or "none".
    index: see ``kind``.
    size: the number, for "size" and "sized".
    """

    kind: str
    index: int = 0
    size: Size = 0


@dataclass(frozen=True)
class Entry:
    """One function of a library: its tensors, and how a graph's inputs and outputs map to them.

    ``arena`` gives the bytes of each storage that its intermediates share.
    """

    signature: Signature
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    arena: tuple[Size, ...] = ()

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Entry:
        """Read what ``asdict`` wrote; KeyError or TypeError where it is malformed."""
        return Entry(
            Signature.from_json(data["signature"]),
            tuple(Port(**port) for port in data["inputs"]),
            tuple(Port(**port) for port in data["outputs"]),
            tuple(data["arena"]),
        )


@dataclass(frozen=True)
class DrawSpec:
    """A random tensor that each call draws with PyTorch's generator (``capture.random.Draw``)."""

    operator: str
    dtype: str
    shape: tuple[Size, ...]
    order: tuple[int, ...]
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class Saved:
    """A tensor that the forward entry keeps for the backward one.

    ``source`` is "input" or "output" where it is one of those, which costs no memory, else "own".
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]
    source: str


@dataclass(frozen=True)
class Training:
    """A forward and a backward entry, and what a call does around them.

    The forward graph takes parameters and buffers (``state``), the arguments' tensors, and what
    ``draws`` draws. It returns the function's outputs, new values of the buffers ``updates``, and
    what is ``saved``. The backward graph takes what is saved and the gradients of the outputs
    ``tangents``, and returns those of the inputs; ``grads`` are the ones that get one.
    ``kernels`` is what each kernel reads and writes, by entry (``view.kernels.table``).
    """

    forward: Entry
    backward: Entry
    state: tuple[str, ...]
    updates: tuple[str, ...]
    draws: tuple[DrawSpec, ...]
    tangents: tuple[int, ...]
    grads: tuple[int, ...]
    saved: tuple[Saved, ...]
    memory_budget: float
    kernels: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; ``from_json`` is its inverse."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Training:
        """Read what ``to_json`` wrote; LibraryError where it is malformed."""
        try:
            found = Training(
                forward=Entry.from_json(data["forward"]),
                backward=Entry.from_json(data["backward"]),
                state=tuple(data["state"]),
                updates=tuple(data["updates"]),
                draws=tuple(DrawSpec(**_tuples(draw)) for draw in data["draws"]),
                tangents=tuple(data["tangents"]),
                grads=tuple(data["grads"]),
                saved=tuple(Saved(**_tuples(saved)) for saved in data["saved"]),
                memory_budget=float(data["memory_budget"]),
                kernels=dict(data["kernels"]),
            )
        except (KeyError, TypeError, ValueError) as e:
            raise LibraryError(
                f"what the manifest says of training is malformed ({e!r}); build it again"
            ) from e
        unknown = [draw.operator for draw in found.draws if draw.operator not in DRAWS]
        if unknown:
            raise LibraryError(f"the library draws with {unknown[0]!r}, which this version lacks")
        return found


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: tuple(v) if isinstance(v, Sequence) and not isinstance(v, str) else v
        for k, v in data.items()
    }
