"""The calling convention: JSON, nested structures, arithmetic on sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.libs import chain_signature, pair_signature
from tvmcap.base.errors import LibraryError
from tvmcap.base.signature import Signature, evaluate, flatten, grows, unflatten


@pytest.mark.parametrize("signature", [chain_signature(maximum=7), pair_signature()])
def test_json_round_trip(signature: Signature) -> None:
    assert Signature.from_json(json.loads(json.dumps(signature.to_json()))) == signature


@pytest.mark.parametrize(
    "missing", ["inputs", "outputs", "dims", "in_tree", "out_tree", "arg_names"]
)
def test_a_missing_field_is_an_error(missing: str) -> None:
    data = chain_signature().to_json()
    del data[missing]
    with pytest.raises(LibraryError, match=missing):
        Signature.from_json(data)


def test_a_field_of_another_kind_is_an_error() -> None:
    data = chain_signature().to_json()
    data["inputs"] = [17]
    with pytest.raises(LibraryError, match="malformed"):
        Signature.from_json(data)


@pytest.mark.parametrize(
    ("size", "value"),
    [
        (7, 7),
        ("B", 5),
        ("B*4 + 1", 21),
        ("(B + T) // 2", 7),
        ("B % 3", 2),
        ("max(B, T) - min(B, T)", 5),
        ("-B + T", 5),
    ],
)
def test_sizes(size: int | str, value: int) -> None:
    assert evaluate(size, {"B": 5, "T": 10}) == value


@pytest.mark.parametrize(
    "size",
    [7, "B", "B * 4", "B * N + 3", "(B - 2) * 32", "(B + 1) // 2", "min(B, N)", "max(B * 2, 8)"],
)
def test_sizes_that_are_largest_where_their_dimensions_are(size: int | str) -> None:
    assert grows(size)


@pytest.mark.parametrize(
    "size",
    ["64 - B", "B * -1 + 64", "1000 // B", "B % 7 + 2", "N * (64 - B)", "min(64 - B, B)", "?"],
)
def test_sizes_that_may_be_larger_where_a_dimension_is_smaller(size: str) -> None:
    assert not grows(size)


@pytest.mark.parametrize(
    "size",
    ["C", "B.__class__", "__import__('os')", "B**9", "B if B else 1", "B[0]", "", "B//0", "'B'"],
)
def test_what_is_no_arithmetic_is_refused(size: str) -> None:
    with pytest.raises(LibraryError, match="cannot evaluate"):
        evaluate(size, {"B": 5})


def test_flatten_is_the_inverse_of_unflatten() -> None:
    tree = pair_signature().out_tree
    nested = {"sum": 1, "parts": (2, 3)}
    assert flatten(tree, nested) == [1, 2, 3]
    assert unflatten(tree, [1, 2, 3]) == nested


def test_flatten_follows_indices_and_keeps_lists() -> None:
    leaf = [{"kind": "leaf", "index": i} for i in (1, 0)]
    tree = {"kind": "list", "items": [*leaf, {"kind": "const", "value": None}]}
    assert flatten(tree, ["second", "first", None]) == ["first", "second"]
    assert unflatten(tree, ["first", "second"]) == ["second", "first", None]


def test_a_signature_is_a_value() -> None:
    assert chain_signature() == chain_signature()
    assert replace(chain_signature(), arg_names=("x", "weight")) != chain_signature()


@pytest.mark.parametrize(
    "size", ["-" * 50_000 + "B", "(" * 500 + "B" + ")" * 500, "B\0", "9" * 9999]
)
def test_what_is_too_much_to_evaluate_is_refused_in_few_words(size: str) -> None:
    with pytest.raises(LibraryError, match="cannot evaluate") as caught:
        evaluate(size, {"B": 5})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("field", ["in_tree", "out_tree"])
def test_a_structure_holds_every_tensor_once(field: str) -> None:
    data = pair_signature().to_json()
    for items in ([], [{"kind": "const", "value": 1}], [{"kind": "leaf", "index": 0}] * 2):
        data[field] = {"kind": "tuple", "items": items}
        with pytest.raises(LibraryError, match=r"a structure of the tensors \["):
            Signature.from_json(data)


@pytest.mark.parametrize("keys", [[["a"], "b"], [None, "b"], ["a", "a"], ["a"]])
def test_keys_of_a_structure_are_different_texts_or_numbers(keys: list[object]) -> None:
    data = pair_signature().to_json()
    leaves = [{"kind": "leaf", "index": i} for i in range(2)]
    good = {"kind": "dict", "keys": ["a", 1], "items": leaves}
    data["in_tree"], data["arg_names"] = {"kind": "tuple", "items": [good]}, ["data"]
    assert Signature.from_json(data).in_tree["items"] == [good]
    data["in_tree"] = {"kind": "tuple", "items": [{**good, "keys": keys}]}
    with pytest.raises(LibraryError, match="malformed"):
        Signature.from_json(data)
