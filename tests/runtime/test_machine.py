"""What runs where: GPU architectures, CPU features, versions, usable cores."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.libs import VERSIONS, chain_signature, manifest_for
from tvmcap.base.errors import IncompatibleLibraryError
from tvmcap.runtime import machine


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (9, 1), False),
        ("sm_90a", (10, 0), False),
        ("sm_90a", (8, 9), False),
        ("sm_90", (9, 0), True),
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_80", (9, 0), False),
        ("sm_89", (8, 6), False),
        ("sm_100a", (10, 0), True),
        ("sm_100f", (10, 3), True),
        ("sm_120", (10, 0), False),
    ],
)
def test_which_gpu_runs_which_cubin(arch: str, capability: tuple[int, int], runs: bool) -> None:
    if runs:
        machine.check_arch(arch, capability)
        return
    here = f"sm_{capability[0]}{capability[1]}"
    with pytest.raises(
        IncompatibleLibraryError, match=f"{arch}, this GPU is {here}.*target='llvm'"
    ):
        machine.check_arch(arch, capability)


def test_an_arch_that_is_none() -> None:
    with pytest.raises(IncompatibleLibraryError, match="expected an arch"):
        machine.check_arch("None", (9, 0))


FLAGS = frozenset("fma avx2 bmi1 sse4_1".split())


def test_missing_cpu_features_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    machine.check_features(["+fma", "avx2", "bmi", "sse4.1", "a-feature-of-no-consequence"], FLAGS)
    with pytest.raises(IncompatibleLibraryError, match="avx512f, avx512vnni, which this CPU lacks"):
        machine.check_features(["avx512vnni", "avx2", "avx512f"], FLAGS)


def test_arm_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    machine.check_features(["neon", "dotprod"], frozenset({"asimd", "asimddp"}))
    with pytest.raises(IncompatibleLibraryError, match="sve2"):
        machine.check_features(["neon", "sve2"], frozenset({"asimd"}))


def test_unknown_platforms_are_not_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with caplog.at_level(logging.INFO, "tvmcap"):
        machine.check_features(["v"], frozenset({"x"}))
    assert "not checked" in caplog.text


@pytest.mark.parametrize("version", ["0.26.0", "0.28.0", "1.0", None])
def test_another_tvm_is_named(version: str | None) -> None:
    with pytest.raises(IncompatibleLibraryError, match=f"built with {version}, here is"):
        machine.check_version(version)


def test_a_post_release_is_the_same_tvm() -> None:
    release = VERSIONS["tvm"].split(".post")[0]
    for version in (release, f"{release}.post9", f"{release}+cu130"):
        machine.check_version(version)


def test_a_gpu_library_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", no_driver)
    manifest = replace(manifest_for(chain_signature()), target={"kind": "cuda", "arch": "sm_90a"})
    with pytest.raises(
        IncompatibleLibraryError, match="no NVIDIA driver: build with target='llvm'"
    ):
        machine.check_machine(manifest)


def test_another_kind_of_target() -> None:
    with pytest.raises(IncompatibleLibraryError, match="'metal'"):
        machine.check_machine(replace(manifest_for(chain_signature()), target={"kind": "metal"}))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
@pytest.mark.parametrize(
    ("quota", "count"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("?", 8)],
)
def test_a_quota_limits_the_cores(quota: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4, 12)))
    monkeypatch.setattr(Path, "read_text", lambda self: quota)
    assert machine.usable_cores() == list(range(4, 4 + count))
