"""The trailer of a library file: what it keeps, and that no damage goes unnoticed."""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.libs import chain_signature, manifest_for
from tvmcap.base import manifest as manifests
from tvmcap.base.errors import DamagedLibraryError, IncompatibleLibraryError, LibraryError
from tvmcap.base.manifest import (
    Manifest,
    Weights,
    append_manifest,
    read_manifest,
    rewrite_manifest,
    write_atomically,
)

FULL = manifest_for(
    chain_signature(maximum=64),
    coverage=(
        {"task": "matmul", "served_by": "template", "record": None, "sizes": [1, 64], "reason": ""},
    ),
    score={"kernels": 1},
    verified=True,
    frozen=("w",),
    weights=Weights("block.so.safetensors", "00", ("w", "b")),
    kernels_per_call=1,
    build_s=1.5,
    config={"target": "llvm"},
    key="k",
    peak_bytes=4096,
)
FOOTER = 56


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Return a file with an ELF header, random bytes, and a trailer."""
    path = tmp_path / "block.so"
    path.write_bytes(b"\x7fELF" + os.urandom(3000))
    append_manifest(path, FULL)
    return path


def test_ranges_of_rows_keep_their_order(library: Path) -> None:
    """Readers take the first range that holds a number of rows."""
    ranges = {"<=8": "a", "<=16": "b", "<=1024": "c", "any": "d"}
    rewrite_manifest(library, replace(FULL, coverage=({**FULL.coverage[0], "ranges": ranges},)))
    assert [*read_manifest(library).coverage[0]["ranges"]] == [*ranges]


def test_what_is_written_is_read(library: Path) -> None:
    assert read_manifest(library) == FULL
    assert read_manifest(library, check=False) == FULL


def test_the_elf_is_untouched(tmp_path: Path) -> None:
    elf = b"\x7fELF" + os.urandom(100)
    path = tmp_path / "block.so"
    path.write_bytes(elf)
    append_manifest(path, FULL)
    assert path.read_bytes().startswith(elf)


def lengths() -> list[int]:
    """Every place where a cut may fall: in the ELF, the JSON, the footer, and at their borders."""
    text = len(json.dumps(FULL.to_json(), sort_keys=True))
    elf, total = 3004, 3004 + text + FOOTER
    borders = [
        0,
        1,
        3,
        4,
        5,
        55,
        56,
        57,
        elf - 1,
        elf,
        elf + 1,
        total - FOOTER - 1,
        total - FOOTER,
        total - FOOTER + 1,
    ]
    return [*borders, elf + text // 2, *range(total - FOOTER + 2, total)]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("length", lengths())
def test_a_truncated_file_is_damaged(library: Path, length: int, check: bool) -> None:
    os.truncate(library, length)
    with pytest.raises(DamagedLibraryError, match=re.escape(str(library))):
        read_manifest(library, check=check)


def test_a_flipped_bit_anywhere_is_damage(library: Path) -> None:
    data = library.read_bytes()
    generator = random.Random(0)
    places = {
        0,
        3,
        4,
        3003,
        3004,
        3005,
        *range(len(data) - FOOTER, len(data)),
        *generator.sample(range(len(data)), 100),
    }
    for place in sorted(places):
        changed = bytearray(data)
        changed[place] ^= 1 << generator.randrange(8)
        library.write_bytes(changed)
        with pytest.raises(DamagedLibraryError):
            read_manifest(library)
    library.write_bytes(data)
    assert read_manifest(library) == FULL


@pytest.mark.parametrize(
    "extra", [b"\0", b"more bytes", os.urandom(FOOTER), os.urandom(5000)], ids=len
)
def test_appended_bytes_are_damage(library: Path, extra: bytes) -> None:
    with open(library, "ab") as file:
        file.write(extra)
    for check in (True, False):
        with pytest.raises(DamagedLibraryError):
            read_manifest(library, check=check)


def test_inserted_bytes_are_damage(library: Path) -> None:
    data = library.read_bytes()
    library.write_bytes(data[:100] + b"x" + data[100:])
    with pytest.raises(
        DamagedLibraryError, match=rf"expected {len(data)} bytes, got {len(data) + 1}"
    ):
        read_manifest(library)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 a zip", b"\x7fELF" + bytes(100), b"text\n" * 100]
)
def test_foreign_files_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.so"
    path.write_bytes(content)
    with pytest.raises(DamagedLibraryError, match=r"empty|not a tvmcap library|no tvmcap manifest"):
        read_manifest(path)


def test_a_folder_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(DamagedLibraryError, match="folder"):
        read_manifest(tmp_path)
    with pytest.raises(LibraryError, match="no such file"):
        read_manifest(tmp_path / "missing.so")


def test_an_unreadable_file(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DamagedLibraryError, match=r"Permission denied\); check its permissions"):
        read_manifest(library)


@pytest.mark.parametrize("number", [1, manifests.FORMAT + 1])
def test_a_manifest_of_another_format(number: int, tmp_path: Path) -> None:
    path = tmp_path / "other.so"
    path.write_bytes(b"\x7fELF")
    append_manifest(path, replace(FULL, format=number))
    with pytest.raises(IncompatibleLibraryError, match=r"other\.so.*another version of tvmcap"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("signature", {}),
        ("target", {}),
        ("target", None),
        ("versions", 3),
        ("weights", {"file": "../../etc/passwd", "sha256": "", "names": []}),
        ("weights", []),
        ("coverage", [3]),
    ],
)
def test_a_malformed_field_is_named_damage(field: str, value: object) -> None:
    with pytest.raises(LibraryError, match="malformed"):
        Manifest.from_json({**FULL.to_json(), field: value})


def test_unknown_fields_are_left_for_later_versions() -> None:
    assert Manifest.from_json({**FULL.to_json(), "later": 1}) == FULL


def test_rewriting_changes_the_manifest_alone(library: Path) -> None:
    elf = library.read_bytes()[:3004]
    changed = replace(FULL, verified=False, config={"a much longer": "x" * 10000})
    rewrite_manifest(library, changed)
    assert read_manifest(library) == changed
    assert library.read_bytes()[:3004] == elf
    assert [p.name for p in library.parent.iterdir()] == ["block.so"]


def test_a_failed_write_leaves_the_old_file(library: Path) -> None:
    before = library.read_bytes()

    def fail(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(library, fail)
    assert library.read_bytes() == before
    assert [p.name for p in library.parent.iterdir()] == ["block.so"]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def fail(temporary: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(LibraryError, match="No space left"):
        write_atomically(tmp_path / "block.so", fail)
    assert not list(tmp_path.iterdir())
