"""Knobs are canonical JSON, and a template's hash follows its source."""

from __future__ import annotations

import dataclasses

import pytest

from tvmcap.base.errors import RecordError
from tvmcap.kernel.template import Template, source_hash


@dataclasses.dataclass(frozen=True)
class Knobs:
    """One of each kind."""

    size: int
    fast: bool
    order: str


def nothing(*args):
    """Stand in for the parts that these tests do not use."""


TEMPLATE = Template("t", Knobs, nothing, nothing, nothing, nothing, nothing, ())


def test_round_trip_is_canonical():
    """Field order does not matter; the text has sorted keys."""
    text = TEMPLATE.knobs_to_json(Knobs(4, True, "n"))
    assert text == '{"fast":true,"order":"n","size":4}'
    assert TEMPLATE.knobs_from_json('{"size": 4, "order": "n", "fast": true}') == Knobs(
        4, True, "n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"size":4}',
        '{"fast":1,"order":"n","size":4}',
        '{"fast":true,"order":"n","size":4,"x":1}',
    ],
)
def test_other_settings_are_refused(text):
    """A record of another version of the template is a named error."""
    with pytest.raises(RecordError, match="tune again"):
        TEMPLATE.knobs_from_json(text)


def test_hash_covers_all_modules():
    """Naming a further module changes the hash; the same template gives the same one."""
    other = dataclasses.replace(TEMPLATE, modules=("tvmcap.kernel.template",))
    assert (
        source_hash(TEMPLATE)
        == source_hash(dataclasses.replace(TEMPLATE, name="u"))
        != source_hash(other)
    )
