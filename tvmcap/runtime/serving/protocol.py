"""The Open Inference Protocol v2 as data: requests to arrays, arrays to responses.

From the protocol's text (github.com/kserve/open-inference-protocol, "Inference Protocol REST") and
its extension for binary tensors (github.com/triton-inference-server/server,
"extension_binary_data"). BF16 is that server's addition.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmcap.base.errors import InputError, LibraryError
from tvmcap.base.signature import Signature, TensorSpec
from tvmcap.runtime.serving.tensors import numpy_dtype

LENGTH_HEADER = "Inference-Header-Content-Length"
JSON_LIMIT = 8 << 20
"""Bytes of JSON in a request: parsing holds up other requests. Larger tensors go as binary."""

_ADDRESSABLE = 2**63 - 1
"""Bytes, of which NumPy wants the product of all sizes but 0 to have no more."""

_DATATYPES = {
    "bool": "BOOL",
    **{f"{u}int{bits}": f"{u.upper()}INT{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
}


class Refused(InputError):
    """A request that is answered with an error; ``status`` is HTTP's."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class Request:
    """A request's tensors in the order of the signature, and what it wants back.

    Attributes
    ----------
    id: echoed in the response; "" where the client gave none.
    arrays: one for each input, on the request's memory where it came as binary.
    outputs: name of each output to return, and whether as binary.
    """

    id: str
    arrays: tuple[Any, ...]
    outputs: tuple[tuple[str, bool], ...]


def check_datatypes(signature: Signature) -> None:
    """Raise LibraryError for a tensor that the protocol has no data type for."""
    for spec in (*signature.inputs, *signature.outputs):
        if spec.dtype not in _DATATYPES:
            raise LibraryError(
                f"{spec.name!r} is {spec.dtype}, which the Open Inference Protocol has no data "
                "type for: give the function arguments and results of another dtype"
            )


def tensor_metadata(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    """Describe tensors; -1 stands for a size that varies."""
    return [
        {
            "name": spec.name,
            "datatype": _DATATYPES[spec.dtype],
            "shape": [size if isinstance(size, int) else -1 for size in spec.shape],
        }
        for spec in specs
    ]


def parse(body: bytes, json_size: int | None, signature: Signature) -> Request:
    """Read a request: ``json_size`` bytes of JSON (all where None), then the binary tensors.

    Raises Refused (400 or 413) that says what was expected and what came. Sizes are not compared
    with the signature; ``binding.make_plan`` does that.
    """
    size = len(body) if json_size is None else json_size
    if size > len(body):
        raise Refused(400, f"{LENGTH_HEADER}: expected at most {len(body)}, the body, got {size}")
    data = load_json(body[:size])
    given = _by_name(data, "inputs", [spec.name for spec in signature.inputs])
    missing = [spec.name for spec in signature.inputs if spec.name not in given]
    if missing:
        raise Refused(400, f"inputs: no {', '.join(missing)}")
    binary = _split(given, memoryview(body)[size:])
    arrays = tuple(_array(spec, given[spec.name], binary) for spec in signature.inputs)
    return Request(_id(data), arrays, _wanted(data, [spec.name for spec in signature.outputs]))


def load_json(text: bytes) -> dict[str, Any]:
    """Read a JSON object; raises Refused for anything else."""
    if len(text) > JSON_LIMIT:
        raise Refused(
            413, f"{len(text)} bytes of JSON, at most {JSON_LIMIT}: send tensors as binary data"
        )
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"the body is not JSON: {e}") from e
    if not isinstance(data, dict):
        raise Refused(400, f"expected a JSON object, got {type(data).__name__}")
    return data


def _id(data: Mapping[str, Any]) -> str:
    value = data.get("id", "")
    if not isinstance(value, str):
        raise Refused(400, "id: expected a string")
    return value


def _by_name(data: Mapping[str, Any], field: str, known: Sequence[str]) -> dict[str, Any]:
    """Return the tensors of a list by name."""
    tensors = data.get(field)
    if not isinstance(tensors, list) or not all(isinstance(t, dict) for t in tensors):
        raise Refused(400, f"{field}: expected a list of objects")
    found: dict[str, Any] = {}
    for tensor in tensors:
        name = tensor.get("name")
        if name not in known:
            raise Refused(400, f"{field}: there is no {name!r}; there are {', '.join(known)}")
        if name in found:
            raise Refused(400, f"{field}: {name!r} stands twice")
        found[name] = tensor
    return found


def _parameters(tensor: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    parameters = tensor.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Refused(400, f"{where}: parameters: expected an object")
    for name in ("shared_memory_region", "classification"):
        if name in parameters:
            raise Refused(400, f"{where}: {name} is an extension that this server lacks")
    return parameters


def _split(given: Mapping[str, Any], binary: memoryview) -> dict[str, memoryview]:
    """Cut the binary part: one piece for each tensor that says its size, in their order."""
    pieces: dict[str, memoryview] = {}
    at = 0
    for name, tensor in given.items():
        size = _parameters(tensor, name).get("binary_data_size")
        if size is None:
            continue
        if not _is_count(size) or at + size > len(binary):
            raise Refused(
                400,
                f"{name}: binary_data_size: {size!r}, and {len(binary) - at} bytes are left "
                f"(without {LENGTH_HEADER} all of the body is JSON)",
            )
        pieces[name] = binary[at : at + size]
        at += size
    if at != len(binary):
        raise Refused(400, f"{len(binary) - at} bytes more than the inputs' binary_data_size say")
    return pieces


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _array(spec: TensorSpec, tensor: Mapping[str, Any], binary: Mapping[str, memoryview]) -> Any:
    name, dtype = spec.name, numpy_dtype(spec.dtype)
    if tensor.get("datatype") != _DATATYPES[spec.dtype]:
        raise Refused(
            400, f"{name}: expected {_DATATYPES[spec.dtype]}, got {tensor.get('datatype')!r}"
        )
    shape = _shape(spec, tensor.get("shape"), dtype.itemsize)
    count = math.prod(shape)
    if name not in binary:
        return _from_json(name, dtype, tensor.get("data"), shape, count)
    if "data" in tensor:
        raise Refused(400, f"{name}: data and binary_data_size: give one of them")
    piece = binary[name]
    if len(piece) != count * dtype.itemsize:
        raise Refused(
            400,
            f"{name}: {shape} of {_DATATYPES[spec.dtype]} is {count * dtype.itemsize} bytes, got "
            f"{len(piece)}",
        )
    if spec.dtype == "bool":
        return (np.frombuffer(piece, np.uint8) != 0).reshape(shape)
    return np.frombuffer(piece, dtype).reshape(shape)


def _shape(spec: TensorSpec, shape: object, itemsize: int) -> list[int]:
    """Return the sizes of a tensor that an array can have."""
    where, told = f"{spec.name}: shape", reprlib.repr(shape)
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise Refused(400, f"{where}: expected a list of sizes, got {told}")
    if len(shape) != len(spec.shape):
        raise Refused(400, f"{where}: expected {len(spec.shape)} sizes, got {len(shape)}")
    if math.prod(size for size in shape if size) * itemsize > _ADDRESSABLE:
        raise Refused(400, f"{where}: no memory holds {told}")
    return shape


def _from_json(name: str, dtype: Any, data: object, shape: Sequence[int], count: int) -> Any:
    """Return values that stand in the JSON, nested or flat."""
    if not isinstance(data, list):
        raise Refused(400, f"{name}: expected data, a list, or the parameter binary_data_size")
    try:
        values = np.array(data, object)  # NumPy makes texts as long as the longest of them
    except ValueError as e:
        raise Refused(400, f"{name}: data: {e}") from e
    if values.shape not in ((count,), tuple(shape)):
        raise Refused(
            400,
            f"{name}: {list(shape)} is {count} values, got {values.size} nested as "
            f"{list(values.shape)}: nest them as the shape says, or not at all",
        )
    wanted = {"b": (bool,), "i": (int,), "u": (int,)}.get(dtype.kind, (int, float))
    if not set(map(type, values.flat)).issubset(wanted):
        raise Refused(400, f"{name}: expected values of {dtype}")
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            array = values.astype(dtype)
        exact = np.array_equal(array, values) if dtype.kind in "iu" else _finite_as(array, values)
    except OverflowError:
        exact = False
    if not exact:
        raise Refused(400, f"{name}: a value is outside the range of {dtype}")
    return array.reshape(shape)


def _finite_as(array: Any, values: Any) -> bool:
    if array.dtype.kind == "b":
        return True
    finite = np.isfinite(array.astype(np.float64))
    return bool(np.array_equal(finite, np.isfinite(values.astype(np.float64))))


def _wanted(data: Mapping[str, Any], names: Sequence[str]) -> tuple[tuple[str, bool], ...]:
    """Return the outputs to send, by default all, and which of them as binary."""
    default = _flag(data, "the request", "binary_data_output", False)
    if not data.get("outputs"):
        return tuple((name, default) for name in names)
    asked = _by_name(data, "outputs", names)
    return tuple((n, _flag(output, n, "binary_data", default)) for n, output in asked.items())


def _flag(tensor: Mapping[str, Any], where: str, name: str, default: bool) -> bool:
    value = _parameters(tensor, where).get(name, default)
    if not isinstance(value, bool):
        raise Refused(400, f"{where}: {name}: expected true or false, got {reprlib.repr(value)}")
    return value


def response(
    request: Request, arrays: Mapping[str, Any], specs: Sequence[TensorSpec], **head: str
) -> tuple[dict[str, str], bytes]:
    """Return headers and body of the response; ``head`` holds model_name and model_version.

    Raises Refused where JSON is wanted for values that JSON does not have.
    """
    dtypes = {spec.name: _DATATYPES[spec.dtype] for spec in specs}
    described, pieces = [], []
    for name, binary in request.outputs:
        array = arrays[name]
        entry: dict[str, Any] = {"name": name, "datatype": dtypes[name]}
        entry["shape"] = list(array.shape)
        if binary:
            pieces.append(array.tobytes())
            entry["parameters"] = {"binary_data_size": array.nbytes}
        else:
            entry["data"] = _to_json(name, array)
        described.append(entry)
    fields = {**head, "outputs": described, **({"id": request.id} if request.id else {})}
    text = json.dumps(fields).encode()
    if not pieces:
        return {"Content-Type": "application/json"}, text
    headers = {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(text))}
    return headers, b"".join([text, *pieces])


def _to_json(name: str, array: Any) -> list[Any]:
    values = array if array.dtype.kind in "biu" else array.astype(np.float64)
    if not np.isfinite(values).all():
        raise Refused(
            400, f"{name}: the result holds NaN or Inf, which JSON lacks: ask for binary_data"
        )
    flat: list[Any] = values.ravel().tolist()
    return flat
