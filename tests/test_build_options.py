"""What build does around the kernels: options, dumps, verification, the compile cache."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tvmcap
from tests.libs import B, values
from tvmcap import pipeline, versions
from tvmcap.base import codegen
from tvmcap.base.errors import BuildError, ConfigError, VerifyError


def test_verify_is_the_default_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tvmcap"):
        lib = tvmcap.build(lambda x: x * 2 + 1, (values(3, 4),), target="llvm", dynamic=B)
    assert lib.manifest.verified is True and "verified: yes" in lib.explain()
    assert tvmcap.load(lib.path).manifest.verified is True


def test_a_wrong_library_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvmcap.kernel import fallback

    real = fallback.schedule

    def broken(func: Any, target: Any) -> Any:
        import tvm_ffi
        from tvm import tirx

        def off(store: Any) -> Any:
            if str(store.value.ty) != "float32":
                return store
            return tirx.BufferStore(
                store.buffer, store.value + tirx.FloatImm("float32", 0.001), store.indices
            )

        done, rule = real(func, target)
        return done.with_body(tvm_ffi.structural_map(done.body, (tirx.BufferStore, off))), rule

    monkeypatch.setattr(fallback, "schedule", broken)
    with pytest.raises(VerifyError, match="out0"):
        tvmcap.build(lambda x: x.exp() * 3, (values(3, 4),), target="llvm")
    monkeypatch.setattr(fallback, "schedule", real)
    with pytest.raises(VerifyError):  # what failed once is no good from the cache either
        tvmcap.build(lambda x: x.exp() * 3, (values(3, 4),), target="llvm")


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown option 'dynamics'; did you mean 'dynamic'"):
        tvmcap.build(lambda x: x, (values(2),), dynamics=B)
    with pytest.raises(ConfigError, match="can be left out are "):
        tvmcap.build(lambda x: x, (values(2),), disable=("fusion",))
    with pytest.raises(ConfigError, match=r"did you mean 'x'|there are: x"):
        tvmcap.build(lambda x: x + 1, (values(2, 2),), dynamic={"y": {0: "B"}}, target="llvm")


def test_dump_writes_numbered_files(tmp_path: Path) -> None:
    tvmcap.build(
        lambda x: x.exp() + 2,
        (values(3, 4),),
        target="llvm",
        dump=str(tmp_path / "ir"),
        verify=False,
        tune="none",
        cache_dir=str(tmp_path / "c"),
    )
    names = sorted(p.name for p in (tmp_path / "ir").iterdir())
    steps = [n.split("_", 1)[1].removesuffix(".py") for n in names]
    target = codegen.make_target("llvm")
    listed = [*pipeline.front(target), *pipeline.back(target, lambda task: [], pipeline.Trace())]
    assert steps == [name for name, _ in listed]
    numbers = [int(n.split("_")[0]) for n in names]
    assert numbers == sorted(set(numbers))
    assert "R.exp" in (tmp_path / "ir" / names[0]).read_text()
    assert "T.prim_func" in (tmp_path / "ir" / names[-1]).read_text()


def test_dump_to_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="choose another folder"):
        tvmcap.build(
            lambda x: x.exp() + 3,
            (values(3, 4),),
            target="llvm",
            dump=str(tmp_path / "file" / "ir"),
            verify=False,
        )


def test_explain_says_what_serves_each_kernel(blocks: Any) -> None:
    _, lib = blocks("tanh", torch.float32)
    text = lib.explain()
    assert "0 of 1 tasks tuned; tvmcap tune" in text
    assert "template:cpu_gemm" in text and "no record" in text
    assert lib.manifest.key in text and "B" in text and "float32" in text
    assert (
        dict(lib.passes).keys() >= {"capture", "fuse", "schedule", "plan", "lower", "export"}
        or lib.from_cache
    )


def test_an_untuned_build_says_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING, "tvmcap"):
        tvmcap.build(
            torch.matmul,
            (values(3, 4), values(4, 4)),
            target="llvm",
            verify=False,
            cache_dir=str(tmp_path),
        )
    assert "0 of 1 tasks tuned" in caplog.text


class Scale(nn.Module):
    def __init__(self, by: float, rows: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows,), by))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x * self.weight)


def test_the_cache_hits_and_misses(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "target": "llvm",
        "cache_dir": str(tmp_path),
        "verify": False,
        "tune": "none",
        "dynamic": B,
    }
    x = values(3, 4)
    first = tvmcap.build(Scale(2.0), (x,), **options)
    again = tvmcap.build(
        Scale(2.0), (values(9, 4),), **options
    )  # another example size of a dynamic dimension
    assert not first.from_cache and again.from_cache and first.path == again.path
    assert torch.equal(again(x), x.relu() * 2) and "from the compile cache" in again.explain()
    others = [
        tvmcap.build(Scale(3.0), (x,), **options),  # weights
        tvmcap.build(Scale(2.0), (x,), **{**options, "disable": ("fuse",)}),
        tvmcap.build(Scale(2.0), (x,), **{**options, "dynamic": None}),
        tvmcap.build(lambda x: F.relu(x * 2), (x,), **options),
        tvmcap.build(lambda x: F.relu(x * 4), (x,), **options),  # a constant in the code
        tvmcap.build(Scale(2.0).double(), (x.double(),), **options),
        tvmcap.build(
            Scale(2.0),
            (x,),
            **{**options, "target": {"kind": "llvm", "mcpu": "x86-64", "num-cores": 2}},
        ),
    ]
    assert not any(lib.from_cache for lib in others)
    assert len({lib.path for lib in [first, *others]}) == len(others) + 1
    quiet = tvmcap.build(
        Scale(2.0), (x,), **{**options, "workers": 1, "log_dir": str(tmp_path / "logs")}
    )
    assert quiet.from_cache  # options that cannot change the code


def test_a_hit_in_another_process_is_the_same_key(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch, tvmcap; from tests.test_build_options import Scale\n"
        "options = {'target': 'llvm', 'cache_dir': sys.argv[1], 'verify': False, 'tune': 'none'}\n"
        "lib = tvmcap.build(Scale(2.0), (torch.ones(3, 4),), **options)\n"
        "print(lib.from_cache, lib.manifest.key)"
    )
    versions.source_hash.cache_clear()
    mine = tvmcap.build(
        Scale(2.0),
        (torch.ones(3, 4),),
        target="llvm",
        cache_dir=str(tmp_path),
        verify=False,
        tune="none",
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
    )
    assert done.stdout.split() == ["True", mine.manifest.key]
