"""Inputs and outputs of ``tvmcap run`` as numpy arrays, without torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tvmcap.base.errors import ConfigError, InputError, TvmcapError
from tvmcap.base.numerics import to_numpy
from tvmcap.base.signature import Signature, evaluate, flatten, unflatten

_FORMATS = (".npz", ".npy", ".safetensors")


def numpy_dtype(name: str) -> Any:
    """Find a dtype by TVM's name; bfloat16 and float8 come from ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))


def draw(signature: Signature, sizes: Mapping[str, int], seed: int) -> list[Any]:
    """Draw normal floats, integers 0 and 1; a size that is not given is 16, within bounds."""
    rng = np.random.default_rng(seed)
    chosen = {d.name: max(d.min, 16 if d.max is None else min(16, d.max)) for d in signature.dims}
    chosen |= sizes
    drawn = []
    for spec in signature.inputs:
        shape = [evaluate(s, chosen) for s in spec.shape]
        floats = spec.dtype.startswith(("float", "bfloat"))
        values = rng.standard_normal(shape) if floats else rng.integers(0, 2, shape)
        drawn.append(np.asarray(values).astype(numpy_dtype(spec.dtype)))
    return drawn


def read(path: str, signature: Signature) -> list[Any]:
    """Read the inputs by their names; a .npy file is the only input."""
    return _read(path, [s.name for s in signature.inputs])


def read_sample(path: str, signature: Signature) -> tuple[list[Any], dict[str, Any]]:
    """Read the inputs, and the outputs by name, of a file that holds both.

    Inputs get the dtypes of the signature where those are 16-bit or 8-bit floats.
    """
    _check_sample(path)
    ins, outs = ([s.name for s in specs] for specs in (signature.inputs, signature.outputs))
    found = _read(path, [*ins, *outs])
    if not any(a.size for a in found[len(ins) :]):
        raise InputError(f"{path}: expected outputs to compare with, got none that has elements")
    inputs = [
        a.astype(numpy_dtype(s.dtype)) if s.dtype.startswith(("bfloat", "float8")) else a
        for a, s in zip(found, signature.inputs, strict=False)
    ]
    return inputs, dict(zip(outs, found[len(ins) :], strict=True))


def write_sample(
    path: str, signature: Signature, leaves: list[Any], outputs: Mapping[str, Any]
) -> None:
    """Write inputs and outputs to one file; 16-bit brain and 8-bit floats as float32."""
    _check_sample(path)
    inputs = {s.name: to_numpy(a) for s, a in zip(signature.inputs, leaves, strict=True)}
    write(path, {**inputs, **outputs})


def _check_sample(path: str) -> None:
    if Path(path).suffix not in (".npz", ".safetensors"):
        raise ConfigError(f"--sample {path}: expected .npz or .safetensors")


def _read(path: str, names: list[str]) -> list[Any]:
    suffix = Path(path).suffix
    if suffix not in _FORMATS:
        raise ConfigError(f"{path}: expected one of {', '.join(_FORMATS)}")
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file")
    if suffix == ".npy" and len(names) != 1:
        raise ConfigError(f"{path}: one array for {', '.join(names)}; use .npz")
    found = _read_arrays(path, suffix, names[0] if names else "")
    missing = [n for n in names if n not in found]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; it has {', '.join(found)}")
    for name in names:
        dtype = found[name].dtype
        if dtype.kind not in "biufV" or issubclass(dtype.type, np.void):
            raise InputError(
                f"{path}: {name}: expected real numbers, got {dtype} (bfloat16 and 8-bit floats "
                "stand in a file as float32)"
            )
    return [found[n] for n in names]


def _read_arrays(path: str, suffix: str, only: str) -> dict[str, Any]:
    """Read the arrays of a file; the one of a .npy file is called ``only``."""
    load_file = _safetensors().load_file if suffix == ".safetensors" else None
    try:
        if load_file is not None:
            return dict(load_file(path))
        stored = np.load(path, allow_pickle=False)
        if (suffix == ".npy") != isinstance(stored, np.ndarray):
            raise ValueError(f"it holds a {type(stored).__name__}")
        if suffix == ".npy":
            return {only: stored}
        with stored:
            return {name: stored[name] for name in stored.files}
    except Exception as e:
        raise InputError(
            f"{path}: expected arrays of numbers in {suffix} form, and they cannot be read "
            f"({_one_line(e)}); write the file again"
        ) from e


def _one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def call(compiled: Any, leaves: list[Any]) -> dict[str, Any]:
    """Call a library and return its outputs by name, as numpy arrays."""
    signature = compiled.signature
    cuda = compiled.manifest.target["kind"] == "cuda"
    if cuda or compiled.manifest.training is not None:
        torch: Any = importlib.import_module("torch")
        device = "cuda" if cuda else "cpu"
        leaves = [
            _to_torch(torch, a, s.dtype, device)
            for a, s in zip(leaves, signature.inputs, strict=True)
        ]
    result = compiled(*unflatten(signature.in_tree, leaves))
    values = flatten(signature.out_tree, result)
    return {s.name: to_numpy(v) for s, v in zip(signature.outputs, values, strict=True)}


def _to_torch(torch: Any, array: Any, dtype: str, device: str) -> Any:
    if array.dtype.kind == "V":
        array = array.astype(np.float32)
    return torch.from_numpy(np.asarray(array, order="C")).to(device, getattr(torch, dtype))


def write(path: str, outputs: Mapping[str, Any]) -> None:
    """Write outputs to .npz, .safetensors, or (one output) .npy."""
    suffix = Path(path).suffix
    if suffix not in _FORMATS or (suffix == ".npy" and len(outputs) != 1):
        raise ConfigError(f"{path}: expected .npz, .safetensors, or .npy for one output")
    save = _safetensors().save if suffix == ".safetensors" else None
    try:
        if save is not None:  # save_file makes files that their owner alone can read
            Path(path).write_bytes(save({k: np.asarray(v, order="C") for k, v in outputs.items()}))
        elif suffix == ".npz":
            np.savez(path, **outputs)
        else:
            np.save(path, next(iter(outputs.values())))
    except Exception as e:
        raise TvmcapError(
            f"{path}: cannot be written ({_one_line(e)}); name a file in a folder that "
            "exists and that you may write to"
        ) from e


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.numpy")
    except ImportError as e:
        raise ConfigError(
            ".safetensors files need: pip install safetensors (run and serve also take .npz)"
        ) from e


def describe(name: str, value: Any) -> dict[str, Any]:
    """Shape, dtype and range of one output."""
    row: dict[str, Any] = {"output": name, "dtype": str(value.dtype), "shape": list(value.shape)}
    floats = value.astype(np.float64) if value.size else np.zeros(1)
    with np.errstate(invalid="ignore"):
        row.update(min=float(floats.min()), max=float(floats.max()), mean=float(floats.mean()))
    row["not finite"] = int((~np.isfinite(floats)).sum())
    return row
