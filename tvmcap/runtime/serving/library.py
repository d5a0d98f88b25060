"""The library behind a name: loaded from a copy of its own, checked, called on batches."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from tvmcap.base.errors import ConfigError, LibraryError, VerifyError
from tvmcap.base.folders import temporary_folder
from tvmcap.base.signature import DimSpec, Signature, TensorSpec, flatten, unflatten
from tvmcap.library.export import copy_library
from tvmcap.runtime.binding import Plan, make_plan
from tvmcap.runtime.loader import ffi
from tvmcap.runtime.serving.protocol import check_datatypes
from tvmcap.runtime.serving.tensors import array_of, numpy_dtype, tensor_on

Arrays = Sequence[Any]
_PARTS_CHECKED = 3
#: Largest error beside the largest value of an output: far above rounding, far below a wrong kernel
_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Sample:
    """What a library is checked on.

    Attributes
    ----------
    rows: inputs of several rows, in the order of the signature; whether their results depend on
        each other tells whether requests can be joined.
    inputs, outputs: inputs and the outputs that they give, by name, where these are known. Floats
        of less than 32 bits may stand as float32.
    """

    rows: tuple[Any, ...]
    inputs: tuple[Any, ...] = ()
    outputs: Mapping[str, Any] | None = None


class ServedLibrary:
    """One library, ready to be called.

    Parameters
    ----------
    path : the library. It is copied first: what happens to the file later, in place or not, does
        not touch the code that runs.
    load : ``tvmcap.load``.
    sample : what to check the library on.
    batched : whether requests shall be joined.
    like : the signature that clients know; the library must take what that took.

    Raises
    ------
    LibraryError, DamagedLibraryError, IncompatibleLibraryError
        As ``tvmcap.load`` does, and for dtypes that the protocol lacks.
    VerifyError
        The library gives other outputs than the sample's.
    ConfigError
        The library has gradients; requests shall be joined, and it does not compute the rows of a
        batch one by one.
    """

    def __init__(
        self,
        path: Path,
        load: Callable[[Path], Any],
        sample: Callable[[Signature], Sample],
        batched: bool,
        like: Signature | None = None,
    ) -> None:
        self.path = path
        self.sha256, self._library = _load_copy(path, load)
        if self._library.manifest.training is not None:
            raise ConfigError(
                f"{path}: a library with gradients cannot be served: build it without backward=True"
            )
        self.signature: Signature = self._library.signature
        check_datatypes(self.signature)
        if like is not None:
            check_successor(like, self.signature)
        self.batch_dim = batch_dimension(self.signature)
        # no bound method: in a cycle the library would outlive its last user
        self._plan = lru_cache(1024)(partial(_plan, self.signature))
        self._cuda = self._library.manifest.target["kind"] == "cuda"
        self._device = ffi().device("cuda", 0) if self._cuda else None
        self._check(sample(self.signature), batched)

    def most_rows(self, wanted: int) -> int:
        """Return how many rows a batch can have, ``wanted`` or fewer."""
        bounds = self._bounds
        return wanted if bounds is None or bounds.max is None else min(wanted, bounds.max)

    @property
    def _bounds(self) -> DimSpec | None:
        return next((dim for dim in self.signature.dims if dim.name == self.batch_dim), None)

    def place(self, arrays: Arrays) -> tuple[int, Hashable]:
        """Return the rows of a request, and what requests must share to be joined with it.

        Raises InputError for sizes that the signature does not admit.
        """
        shapes = tuple(array.shape for array in arrays)
        dims = self._plan(shapes).dims
        if self.batch_dim is None:
            return 1, shapes
        return dims[self.batch_dim], tuple(shape[1:] for shape in shapes)

    def run(self, requests: list[Arrays]) -> list[Arrays]:
        """Call the library once on the rows of all requests; return the outputs of each."""
        if len(requests) == 1:
            return [self._call(requests[0])]
        joined = [np.concatenate(parts) for parts in zip(*requests, strict=True)]
        outputs = self._call(joined)
        ends = np.cumsum([len(arrays[0]) for arrays in requests])[:-1]
        return list(zip(*(np.split(output, ends) for output in outputs), strict=True))

    def _call(self, leaves: Arrays) -> Arrays:
        signature = self.signature
        if self._cuda:
            leaves = [
                tensor_on(array, spec.dtype, self._device)
                for array, spec in zip(leaves, signature.inputs, strict=True)
            ]
        result = self._library(*unflatten(signature.in_tree, list(leaves)))
        outputs = flatten(signature.out_tree, result)
        if self._cuda:
            outputs = [
                array_of(tensor, numpy_dtype(spec.dtype))
                for tensor, spec in zip(outputs, signature.outputs, strict=True)
            ]
        return outputs

    def _check(self, sample: Sample, batched: bool) -> None:
        if sample.outputs is not None:
            self.place(sample.inputs)
            want = [sample.outputs[spec.name] for spec in self.signature.outputs]
            self._compare(self._call(sample.inputs), want)
        elif not batched:
            self.place(sample.rows)
            self._call(sample.rows)
        if not batched:
            return
        bounds = self._bounds
        if bounds is None:
            raise ConfigError(
                f"{self.path}: requests cannot be joined, as not every input and output has the "
                "same dynamic dimension in front: serve it with --max-batch 1, or build it with "
                "dynamic={...}"
            )
        self._check_rows(sample.rows, max(1, bounds.min))

    def _check_rows(self, inputs: Arrays, least: int) -> None:
        """Compare the rows of one call with calls on ``least`` of them each."""
        rows, _ = self.place(inputs)
        together = self._call(inputs)
        starts = range(0, rows - least + 1, least)[:_PARTS_CHECKED]
        parts = [self._call([a[start : start + least] for a in inputs]) for start in starts]
        apart = [np.concatenate(part) for part in zip(*parts, strict=True)]
        try:
            self._compare([output[: least * len(starts)] for output in together], apart)
        except VerifyError as e:
            raise ConfigError(
                f"{self.path}: requests cannot be joined, as rows of a batch depend on each other "
                f"({e}): serve it with --max-batch 1"
            ) from e

    def _compare(self, got: Arrays, want: Arrays) -> None:
        for spec, ours, theirs in zip(self.signature.outputs, got, want, strict=True):
            if ours.shape != theirs.shape:
                raise VerifyError(
                    f"{self.path}: {spec.name}: expected shape {list(theirs.shape)}, got "
                    f"{list(ours.shape)}"
                )
            a, b = ours.astype(np.float64), theirs.astype(np.float64)
            finite = np.isfinite(a) & np.isfinite(b)
            error = float(np.abs(a - b)[finite].max(initial=0.0))
            scale = float(np.abs(b)[finite].max(initial=0.0))
            same = np.array_equal(a[~finite], b[~finite], equal_nan=True)
            if not same or error > _TOLERANCE.get(spec.dtype, 0.0) * scale:
                raise VerifyError(
                    f"{self.path}: {spec.name} differs by up to {error:.3g}, where values reach "
                    f"{scale:.3g}"
                )


def _plan(signature: Signature, shapes: tuple[tuple[int, ...], ...]) -> Plan:
    return make_plan(signature, shapes, lambda dtype: int(numpy_dtype(dtype).itemsize))


def batch_dimension(signature: Signature) -> str | None:
    """Return the dimension along which requests can be joined, or None.

    It stands in front of every input and output, and nowhere else.
    """
    tensors: tuple[TensorSpec, ...] = (*signature.inputs, *signature.outputs)
    if not signature.inputs or not all(spec.shape for spec in tensors):
        return None
    first = signature.inputs[0].shape[0]
    if not isinstance(first, str) or any(spec.shape[0] != first for spec in tensors):
        return None
    rest = " ".join(str(size) for spec in tensors for size in spec.shape[1:])
    return None if first in _WORD.findall(rest) else first


def check_successor(old: Signature, new: Signature) -> None:
    """Raise LibraryError where clients of ``old`` could not call ``new`` as they did."""
    for field in ("inputs", "outputs"):
        before, after = (tuple(map(_text, getattr(s, field))) for s in (old, new))
        if before != after:
            raise LibraryError(
                f"{field} differ: expected {', '.join(before)}, got {', '.join(after)}; serve a "
                "library of another signature under another name"
            )
    bounds = {dim.name: dim for dim in new.dims}
    for dim in old.dims:
        now = bounds.get(dim.name, DimSpec(dim.name))
        if now.min > dim.min or (now.max is not None and (dim.max is None or now.max < dim.max)):
            raise LibraryError(
                f"{dim.name} was from {dim.min} to {dim.max}, and the new library takes from "
                f"{now.min} to {now.max} only; build it with those bounds"
            )


def _text(spec: TensorSpec) -> str:
    return f"{spec.name}: {spec.dtype}[{', '.join(map(str, spec.shape))}]"


def _load_copy(path: Path, load: Callable[[Path], Any]) -> tuple[str, Any]:
    """Load a private copy; once it is loaded its file may go."""
    with temporary_folder("tvmcap-serve-") as folder:
        copy = folder / path.name
        copy_library(path, copy)
        digest = hashlib.sha256()
        with open(copy, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest(), load(copy)
