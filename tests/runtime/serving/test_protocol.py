"""The Open Inference Protocol as data, against the real client's own bytes."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton

from tests.libs import leaves
from tvmcap.base.errors import LibraryError
from tvmcap.base.signature import DimSpec, Signature, TensorSpec
from tvmcap.runtime.serving import protocol
from tvmcap.runtime.serving.protocol import Refused

DTYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
}


def signature(*dtypes):
    specs = tuple(TensorSpec(f"x{i}", dtype, ("B", 3)) for i, dtype in enumerate(dtypes))
    outs = tuple(TensorSpec(f"out{i}", dtype, ("B", 3)) for i, dtype in enumerate(dtypes))
    names = tuple(spec.name for spec in specs)
    return Signature(specs, outs, (DimSpec("B"),), leaves(len(specs)), leaves(len(specs)), names)


def values(dtype, rows=4, seed=0):
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random((rows, 3)) < 0.5
    if "int" in dtype:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, (rows, 3), dtype, endpoint=True)
    return rng.standard_normal((rows, 3)).astype(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    )


def client_bytes(arrays, names, binary):
    """What tritonclient sends for these inputs."""
    inputs = []
    for name, (dtype, array) in zip(names, arrays, strict=True):
        given = triton.InferInput(name, list(array.shape), DTYPES[dtype])
        bf16 = dtype == "bfloat16"
        given.set_data_from_numpy(array.astype(np.float32) if bf16 else array, binary_data=binary)
        inputs.append(given)
    return triton.InferenceServerClient.generate_request_body(inputs, request_id="7")


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_tensors_of_the_real_client_and_back(dtype):
    sig, array = signature(dtype, "int32"), values(dtype)
    other = values("int32", seed=1)
    body, size = client_bytes([(dtype, array), ("int32", other)], ["x0", "x1"], True)
    request = protocol.parse(body, size, sig)
    assert request.id == "7" and [b for _, b in request.outputs] == [True, True]
    for got, want in zip(request.arrays, (array, other), strict=True):
        assert got.dtype == want.dtype and np.array_equal(got, want)
    results = {"out0": array, "out1": other}
    headers, content = protocol.response(request, results, sig.outputs, model_name="m")
    parsed = triton.InferenceServerClient.parse_response_body(
        content, header_length=int(headers[protocol.LENGTH_HEADER])
    )
    assert parsed.get_response()["id"] == "7"
    got = parsed.as_numpy("out0")
    assert np.array_equal(got, array.astype(np.float32) if dtype == "bfloat16" else array)
    assert np.array_equal(parsed.as_numpy("out1"), other)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in ("float16", "bfloat16")])
@pytest.mark.parametrize("nested", [False, True])
def test_json_tensors_and_back(dtype, nested):
    sig, array = signature(dtype), values(dtype)
    data = array.tolist() if nested else array.ravel().tolist()
    entry = {"name": "x0", "datatype": DTYPES[dtype], "shape": [4, 3], "data": data}
    request = protocol.parse(json.dumps({"inputs": [entry]}).encode(), None, sig)
    assert request.arrays[0].dtype == array.dtype and np.array_equal(request.arrays[0], array)
    headers, content = protocol.response(request, {"out0": array}, sig.outputs)
    assert headers == {"Content-Type": "application/json"}
    output = json.loads(content)["outputs"][0]
    assert output["datatype"] == DTYPES[dtype] and output["shape"] == [4, 3]
    assert np.array_equal(np.array(output["data"], array.dtype).reshape(4, 3), array)


def test_outputs_that_are_asked_for_each_in_its_form():
    sig = signature("float32", "float32")
    entries = [
        {"name": f"x{i}", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]} for i in (1, 0)
    ]
    asked = [{"name": "out1", "parameters": {"binary_data": True}}, {"name": "out0"}]
    body = json.dumps({"inputs": entries, "outputs": asked}).encode()
    request = protocol.parse(body, None, sig)
    assert request.outputs == (("out1", True), ("out0", False))
    results = {n: np.full((1, 3), v, np.float32) for n, v in (("out0", 5), ("out1", 6))}
    headers, content = protocol.response(request, results, sig.outputs)
    size = int(headers[protocol.LENGTH_HEADER])
    assert content[size:] == results["out1"].tobytes()
    assert json.loads(content[:size])["outputs"][1]["data"] == [5, 5, 5]


def test_values_that_json_lacks():
    sig = signature("float32")
    entry = {"name": "x0", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    request = protocol.parse(json.dumps({"inputs": [entry]}).encode(), None, sig)
    with pytest.raises(Refused, match=r"NaN or Inf.*binary_data"):
        protocol.response(request, {"out0": np.full((1, 3), np.nan)}, sig.outputs)


def entry(**changes):
    given = {"name": "x0", "datatype": "FP32", "shape": [2, 3], "data": [0.0] * 6, **changes}
    return {k: v for k, v in given.items() if v is not ...}


def binary(size, **changes):
    return entry(data=..., parameters={"binary_data_size": size}, **changes)


BAD = {
    "not JSON": (b"{", "not JSON"),
    "not UTF-8": (b"\xff\xfe\xfa", "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "long number": (b'{"inputs": ' + b"9" * 10_000 + b"}", "not JSON"),
    "a list": ([], "expected a JSON object"),
    "no inputs": ({}, "inputs: expected a list"),
    "inputs of strings": ({"inputs": ["x"]}, "inputs: expected a list"),
    "unknown": ({"inputs": [entry(name="y")]}, "there is no 'y'; there are x0"),
    "name of a list": ({"inputs": [entry(name=[])]}, r"there is no \[\]"),
    "missing": ({"inputs": []}, "no x0"),
    "twice": ({"inputs": [entry(), entry()]}, "stands twice"),
    "other type": ({"inputs": [entry(datatype="FP64")]}, "expected FP32, got 'FP64'"),
    "no type": ({"inputs": [entry(datatype=...)]}, "expected FP32, got None"),
    "negative": ({"inputs": [entry(shape=[-1, 3])]}, "expected a list of sizes"),
    "true": ({"inputs": [entry(shape=[True, 3])]}, "expected a list of sizes"),
    "count": ({"inputs": [entry(data=[1.0])]}, "is 6 values, got 1"),
    "ragged": ({"inputs": [entry(data=[[1.0], [1.0, 2.0]])]}, "is 6 values, got 2"),
    "ragged, as many as values": (
        {"inputs": [entry(data=[[1.0], 1.0, 2.0, 3.0, 4.0, 5.0])]},
        "expected values of float32",
    ),
    "a long text among many": (
        {"inputs": [entry(data=[*[""] * 200_000, "x" * 200_000])]},
        "is 6 values, got 200001",
    ),
    "a truth among numbers": ({"inputs": [entry(data=[True, *[1.0] * 5])]}, "expected values of"),
    "an integer beyond floats": ({"inputs": [entry(data=[10**400] * 6)]}, "outside the range"),
    "text": ({"inputs": [entry(data=["a"] * 6)]}, "expected values of float32"),
    "null": ({"inputs": [entry(data=[None] * 6)]}, "expected values of float32"),
    "number": ({"inputs": [entry(data=1.0)]}, "expected data, a list"),
    "too large": ({"inputs": [entry(data=[1e300] * 6)]}, "outside the range"),
    "huge shape": ({"inputs": [entry(shape=[10**9, 10**9])]}, "values, got 6"),
    "a shape beyond memory": ({"inputs": [entry(shape=[10**12, 10**12])]}, "no memory holds"),
    "nothing, of a shape beyond memory": ({"inputs": [entry(shape=[0, 2**62])]}, "no memory holds"),
    "many huge sizes": ({"inputs": [entry(shape=[10**4000] * 2000)]}, "expected 2 sizes, got 2000"),
    "few huge sizes": ({"inputs": [entry(shape=[10**4000] * 2)]}, "no memory holds"),
    "bytes that are not there": ({"inputs": [binary(24)]}, "0 bytes are left"),
    "size of text": ({"inputs": [binary("24")]}, "binary_data_size: '24'"),
    "parameters": ({"inputs": [entry(parameters=3)]}, "parameters: expected an object"),
    "id": ({"inputs": [entry()], "id": 3}, "id: expected a string"),
    "output": ({"inputs": [entry()], "outputs": [{"name": "q"}]}, "no 'q'; there are out0"),
    "shared memory": (
        {"inputs": [entry(parameters={"shared_memory_region": "r"})]},
        "an extension that this server lacks",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_requests_are_refused_with_the_reason(case):
    content, words = BAD[case]
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises(Refused, match=words) as caught:
        protocol.parse(body, None, signature("float32"))
    assert caught.value.status == 400


def test_binary_parts_that_do_not_fit():
    text = json.dumps({"inputs": [binary(24)]}).encode()
    for rest, size, words in (
        (b"\0" * 23, len(text), "23 bytes are left"),
        (b"\0" * 25, len(text), "1 bytes more"),
        (b"", len(text) + 1, "expected at most"),
    ):
        with pytest.raises(Refused, match=words):
            protocol.parse(text + rest, size, signature("float32"))
    text = json.dumps({"inputs": [binary(20)]}).encode()
    with pytest.raises(Refused, match="is 24 bytes, got 20"):
        protocol.parse(text + b"\0" * 20, len(text), signature("float32"))
    text = json.dumps({"inputs": [binary(24) | {"data": [1]}]}).encode()
    with pytest.raises(Refused, match="one of them"):
        protocol.parse(text + b"\0" * 24, len(text), signature("float32"))


def test_integers_outside_their_range():
    for data in ([300] * 6, [-1] * 6, [1.5] * 6):
        text = json.dumps({"inputs": [entry(datatype="UINT8", data=data)]}).encode()
        with pytest.raises(Refused, match=r"range|expected values"):
            protocol.parse(text, None, signature("uint8"))


def test_json_has_a_limit_of_its_own():
    with pytest.raises(Refused) as caught:
        protocol.parse(b" " * (protocol.JSON_LIMIT + 1), None, signature("float32"))
    assert caught.value.status == 413


def test_dtypes_that_the_protocol_lacks():
    with pytest.raises(LibraryError, match="'x0' is float8_e4m3fn"):
        protocol.check_datatypes(signature("float8_e4m3fn"))


def test_nested_values_have_the_shape_that_is_said():
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    for data in (array.ravel(), array):
        text = json.dumps({"inputs": [entry(shape=[4, 3], data=data.tolist())]}).encode()
        np.testing.assert_array_equal(
            protocol.parse(text, None, signature("float32")).arrays[0], array
        )
    for data in (array.T, array.reshape(2, 2, 3), array[None], array.reshape(2, 6)):
        text = json.dumps({"inputs": [entry(shape=[4, 3], data=data.tolist())]}).encode()
        with pytest.raises(Refused, match=r"\[4, 3\] is 12 values, got 12 nested as"):
            protocol.parse(text, None, signature("float32"))


@pytest.mark.parametrize("value", ["false", 0, 1, None, []])
def test_what_is_neither_true_nor_false(value):
    good = {"inputs": [entry()]}
    one = {"name": "out0", "parameters": {"binary_data": value}}
    for asked in ({"parameters": {"binary_data_output": value}}, {"outputs": [one]}):
        with pytest.raises(Refused, match="expected true or false"):
            protocol.parse(json.dumps(good | asked).encode(), None, signature("float32"))
