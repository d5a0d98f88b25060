"""Buckets: a batch padded to one of a few sizes, so that few sizes are recorded."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from tvmcap.base.errors import ConfigError, LibraryError
from tvmcap.base.signature import Signature, TensorSpec
from tvmcap.runtime.binding import Plan, Shape

#: (inputs, their shapes, outputs or None for new ones) -> outputs: one call of the library.
Run = Callable[[Sequence[Any], tuple[Shape, ...], Sequence[Any] | None], list[Any]]
#: Error of the first padded call against an exact one, over the largest result: far above what
#: another kernel for another size rounds differently, far below what a mix of rows does.
_TOLERANCE = 0.05


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


class Buckets:
    """The sizes that a call's batch is padded to: the smallest that holds it.

    Rows must not depend on each other, as the rows that pad hold leftovers. The library has one
    symbolic dimension, the first of every tensor that has it. The first call at each bucket runs
    once more at its exact size to compare.

    Raises
    ------
    ConfigError
        For a library or sizes that do not fit.
    """

    def __init__(self, signature: Signature, sizes: Sequence[int]) -> None:
        if not isinstance(sizes, Sequence) or not all(map(_is_size, sizes)):
            raise ConfigError(f"buckets: expected sizes from 1 such as (16, 64), got {sizes!r}")
        self.sizes = sorted(set(sizes))
        if len(signature.dims) != 1:
            raise ConfigError(
                f"buckets: expected a library with one symbolic dimension, got "
                f"{len(signature.dims)}: build it with dynamic={{...}} for the batch alone"
            )
        dim = signature.dims[0]
        self._name = dim.name
        wrong = [s for s in self.sizes if s < dim.min or (dim.max is not None and s > dim.max)]
        if wrong:
            raise ConfigError(
                f"buckets: expected sizes of {dim.name} from {dim.min} to {dim.max}, got {wrong}"
            )
        for spec in (*signature.inputs, *signature.outputs):
            self._check(spec, must=spec in signature.outputs)
        self._padded = [self._name in spec.shape for spec in signature.inputs]
        self._compared: set[int] = set()

    def _check(self, spec: TensorSpec, must: bool) -> None:
        first, rest = spec.shape[:1], spec.shape[1:]
        alone = all(isinstance(size, int) for size in rest)
        if not alone or not (first == (self._name,) or (not must and isinstance(first[0], int))):
            raise ConfigError(
                f"buckets: expected {self._name} as the first dimension of {spec.name!r}, got "
                f"{list(spec.shape)}; without buckets every size is recorded by itself"
            )

    def find(self, plan: Plan) -> int | None:
        """Return the size to pad a call to; None where it runs as it is."""
        count = plan.dims[self._name]
        at = bisect.bisect_left(self.sizes, count)
        if plan.zero or at == len(self.sizes) or self.sizes[at] == count:
            return None
        return self.sizes[at]

    def holds(self, plan: Plan) -> bool:
        """Whether the sizes of a call are those of a bucket."""
        return plan.dims[self._name] in self.sizes

    def call(
        self, size: int, plan: Plan, values: Sequence[Any], slots: dict[Any, Any], run: Run
    ) -> list[Any]:
        """Return the outputs of a padded call: the first rows of what stays in ``slots``."""
        count = plan.dims[self._name]
        held = slots.get(size)
        if held is None:
            inputs = [
                value.new_zeros((size, *value.shape[1:])) if padded else value
                for value, padded in zip(values, self._padded, strict=True)
            ]
            held = slots[size] = {"inputs": inputs, "outputs": None}
        inputs = held["inputs"]
        for position, (value, padded) in enumerate(zip(values, self._padded, strict=True)):
            if padded:
                inputs[position][:count].copy_(value)
            else:
                inputs[position] = value
        shapes = tuple(value.shape for value in inputs)
        outputs = held["outputs"] = run(inputs, shapes, held["outputs"])
        results = [out[:count] for out in outputs]
        if size not in self._compared:
            exact = run(values, tuple(value.shape for value in values), None)
            self._compare(size, count, results, exact)
        return results

    def _compare(self, size: int, count: int, results: Sequence[Any], exact: Sequence[Any]) -> None:
        for got, want in zip(results, exact, strict=True):
            got, want = got.double(), want.double()
            close = (got - want).abs() <= _TOLERANCE * want.abs().nan_to_num().max()
            if not (close | (got == want) | (got.isnan() & want.isnan())).all():
                raise LibraryError(
                    f"buckets: {self._name}={count} padded to {size} gives other results than "
                    "without: the rows of this function depend on each other, so leave buckets out"
                )
        self._compared.add(size)
