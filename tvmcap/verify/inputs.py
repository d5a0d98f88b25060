"""Seeded inputs for verification, drawn from a signature and the ranges of the user's own example.

Each set has a name, the sizes of the symbolic dimensions and one tensor for each input. Floats are
normal with the example's own mean and deviation; integers and bools keep the example's range.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tvmcap.base.numerics import dtype_name
from tvmcap.base.signature import Signature, TensorSpec, evaluate
from tvmcap.verify.reference import free_bytes

#: Sizes about the tiles of every kernel, and a prime.
EDGES = (1, 2, 13, 127, 128, 129)
FULL_EDGES = (*EDGES, 63, 257, 509, 2048)
#: Scale of the large magnitudes; float16 overflows at 65504, so a product of two has to stay below.
LARGE = {"float16": 8.0}
LARGE_DEFAULT = 64.0
KINDS = ("normal", "large", "zeros", "nonfinite")
_DEFAULT_SIZE = 16
_SAMPLE = 1 << 16


@dataclass(frozen=True)
class InputSet:
    """Inputs of one check: which kind, at which sizes, and the seed that repeats them."""

    kind: str
    sizes: Mapping[str, int]
    seed: int

    def __str__(self) -> str:
        """Name the set as reports do."""
        sizes = " ".join(f"{k}={v}" for k, v in self.sizes.items())
        return f"{self.kind} {sizes}".strip()


def plan_inputs(
    signature: Signature,
    example: Sequence[torch.Tensor] | None = None,
    *,
    level: str = "quick",
    sizes: Sequence[Mapping[str, int]] | None = None,
    seed: int = 0,
) -> list[InputSet]:
    """List the sets to check, the most telling first.

    ``level``: ``"quick"`` checks normal inputs at the example's sizes and at tile edges, and large
    magnitudes and zeros at the example's sizes; ``"full"`` adds sizes and NaN and Inf inputs.
    ``sizes`` replaces the sizes chosen here.
    """
    if level not in ("quick", "full"):
        raise ValueError(f"level={level!r}: expected 'quick' or 'full'")
    base = example_sizes(signature, example)
    chosen = [{**base, **s} for s in sizes] if sizes else edge_sizes(signature, base, level)
    kinds = [k for k in KINDS[1:] if level == "full" or k != "nonfinite"]
    if any(output.dtype.startswith("int") for output in signature.outputs):
        kinds.remove("zeros")  # among equal values no position is the right one (argmax, sort)
    sets = [("normal", chosen[0]), *((kind, chosen[0]) for kind in kinds)]
    sets += [("normal", s) for s in chosen[1:]]
    return [InputSet(kind, s, seed + i) for i, (kind, s) in enumerate(sets)]


def example_sizes(
    signature: Signature, example: Sequence[torch.Tensor] | None = None
) -> dict[str, int]:
    """Sizes of the symbolic dimensions in ``example``, or 16 within bounds where there is none."""
    found: dict[str, int] = {}
    for spec, tensor in zip(signature.inputs, example or (), strict=False):
        for size, extent in zip(spec.shape, tensor.shape, strict=True):
            if isinstance(size, str):
                found[size] = int(extent)
    bounds = {d.name: (d.min, d.max if d.max is not None else math.inf) for d in signature.dims}
    values = {n: found.get(n, _DEFAULT_SIZE) for n in bounds}
    return {n: int(min(max(v, bounds[n][0], 1), bounds[n][1])) for n, v in values.items()}


def edge_sizes(signature: Signature, base: Mapping[str, int], level: str) -> list[dict[str, int]]:
    """Return ``base``, then each dimension in turn at its minimum and at tile edges.

    Empty batches are part of ``"full"`` alone: eager itself has operators that refuse them.
    """
    chosen: list[dict[str, int]] = [dict(base)]
    for dim in signature.dims:
        least = dim.min if level == "full" else max(dim.min, 1)
        edges = {least, *(EDGES if level == "quick" else FULL_EDGES)}
        if dim.max is not None and (level == "full" or dim.max <= max(EDGES)):
            edges.add(dim.max)
        for size in sorted(edges):
            sizes = {**base, dim.name: size}
            inside = dim.min <= size and (dim.max is None or size <= dim.max)
            if inside and sizes not in chosen and _fits(signature, sizes):
                chosen.append(sizes)
    return chosen


def _fits(signature: Signature, sizes: Mapping[str, int]) -> bool:
    count = 0
    for spec in (*signature.inputs, *signature.outputs):
        shape = [evaluate(s, sizes) for s in spec.shape]
        if any(extent < 0 for extent in shape):
            return False
        count += math.prod(shape)
    return count * 8 * 4 <= free_bytes(torch.device("cpu")) // 2


def draw(
    signature: Signature,
    chosen: InputSet,
    example: Sequence[torch.Tensor] | None = None,
    fixed: dict[tuple[str, int], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Draw the tensors of one set on the CPU, in the order of ``signature.inputs``.

    ``fixed`` keeps inputs without symbolic sizes, by kind and position, for the sets to come.
    """
    kept = {} if fixed is None else fixed
    tensors = []
    for i, spec in enumerate(signature.inputs):
        at = (chosen.kind, i)
        if at in kept:
            tensors.append(kept[at])
            continue
        gen = torch.Generator().manual_seed(
            chosen.seed * 1000 + i + zlib.crc32(chosen.kind.encode())
        )
        shape = [evaluate(s, chosen.sizes) for s in spec.shape]
        like = None if not example else _sample(example[i])
        tensors.append(_draw_one(spec, shape, like, chosen.kind, gen))
        if not any(isinstance(s, str) for s in spec.shape):
            kept[at] = tensors[-1]
    return tensors


def varied(example: Sequence[torch.Tensor]) -> bool:
    """Whether the example tells values from one another: zeros or ones everywhere do not."""
    return any(t.numel() and bool((t != t.flatten()[0]).any()) for t in example)


def pick(
    signature: Signature, chosen: InputSet, example: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Draw the example's own values: along symbolic dimensions, what stands at random places.

    Equal names are equal places; at the example's own sizes it is the example.
    """
    gen = torch.Generator().manual_seed(chosen.seed)
    places: dict[str, torch.Tensor] = {}
    found = []
    for spec, tensor in zip(signature.inputs, example, strict=True):
        own = tensor.detach().cpu()
        for axis, size in enumerate(spec.shape):
            extent, wanted = own.shape[axis], evaluate(size, chosen.sizes)
            if extent == wanted:
                continue
            place = str(size)
            if place not in places:
                places[place] = torch.randint(extent, (wanted,), generator=gen)
            own = own.index_select(axis, places[place])
        found.append(own.contiguous())
    return found


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Take evenly spaced elements of a large tensor: enough to know its range."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE)].cpu()


def _draw_one(
    spec: TensorSpec,
    shape: list[int],
    like: torch.Tensor | None,
    kind: str,
    gen: torch.Generator,
) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype == torch.bool:
        rate = float(like.double().mean()) if like is not None and like.numel() else 0.5
        return torch.rand(shape, generator=gen) < (rate if 0 < rate < 1 else 0.5)
    if not dtype.is_floating_point:
        low, high = (
            (int(like.min()), int(like.max())) if like is not None and like.numel() else (0, 1)
        )
        return torch.randint(low, high + 1, shape, generator=gen).to(dtype)
    if kind == "zeros":
        return torch.zeros(shape, dtype=dtype)
    values = _draw_float(shape, like, gen)
    if kind == "large":
        values = values * LARGE.get(dtype_name(torch.empty(0, dtype=dtype)), LARGE_DEFAULT)
    if kind == "nonfinite" and values.numel():
        for value in (math.nan, math.inf, -math.inf):
            values.view(-1)[int(torch.randint(values.numel(), (), generator=gen))] = value
    return values.to(dtype)


def _draw_float(shape: list[int], like: torch.Tensor | None, gen: torch.Generator) -> torch.Tensor:
    """Draw normal values with the mean and deviation of ``like``, or resample it.

    Masks (few or infinite values) are resampled; what is never negative stays within its range.
    """
    normal = torch.randn(shape, generator=gen)
    if like is None or like.numel() == 0:
        return normal
    flat = like.flatten().float()
    if not bool(torch.isfinite(flat).all()):
        return flat[torch.randint(flat.numel(), shape, generator=gen)]
    low, high = float(flat.min()), float(flat.max())
    if low == high:
        return normal + low
    if low >= 0:
        return low + (high - low) * torch.rand(shape, generator=gen)
    return normal * float(flat.std()) + float(flat.mean())
