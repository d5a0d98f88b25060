"""Without examples: the first call captures, the second size frees the dimension, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tvmcap
from tvmcap.base.config import Dim
from tvmcap.base.errors import ConfigError, InputError, LibraryError
from tvmcap.lazy import Lazy


def block(x: torch.Tensor, w: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return (x * scale + w).relu()


def lazy(fn: Any = block, **options: Any) -> Lazy:
    made = tvmcap.build(fn, target="llvm", tune="none", verify=False, **options)
    assert isinstance(made, Lazy)
    return made


def check(lib: Lazy, fn: Any, *args: torch.Tensor) -> None:
    torch.testing.assert_close(lib(*args), fn(*args))


def test_one_compile_then_one_more_then_none() -> None:
    lib, w = lazy(), torch.randn(4)
    check(lib, block, torch.randn(3, 4), w)
    check(lib, block, torch.randn(3, 4), w)
    assert len(lib.compiles) == 1 and lib.signature.dims == ()
    for rows in range(1, 51):
        check(lib, block, torch.randn(rows, 4), w)
    assert len(lib.compiles) == 2
    assert [d.name for d in lib.signature.dims] == ["d0"]
    text = lib.explain()
    assert text.startswith(
        "2 compiles\ncompile 1: first call: x[3, 4], w[4]\n"
        "compile 2: x[0] varies and becomes symbolic: x[1, 4]"
    )
    assert "kernels" in text


def test_equal_sizes_share_a_name() -> None:
    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    lib = lazy(product)
    check(lib, product, torch.randn(3, 5), torch.randn(5, 2))
    check(lib, product, torch.randn(3, 7), torch.randn(7, 2))
    check(lib, product, torch.randn(9, 7), torch.randn(7, 2))
    check(lib, product, torch.randn(2, 4), torch.randn(4, 2))
    assert len(lib.compiles) == 3 and len(lib.signature.dims) == 2


def test_names_given_beforehand_need_one_compile() -> None:
    lib = lazy(dynamic={"x": {0: Dim("B", max=9)}})
    w = torch.randn(4)
    for rows in (2, 9, 1):
        check(lib, block, torch.randn(rows, 4), w)
    assert len(lib.compiles) == 1
    with pytest.raises(InputError, match="9"):
        lib(torch.randn(10, 4), w)
    assert len(lib.compiles) == 1


def test_keywords_and_out() -> None:
    lib = lazy()
    x, w, out = torch.randn(3, 4), torch.randn(4), torch.empty(3, 4)
    assert lib(x, w=w, out=out) is out
    torch.testing.assert_close(out, block(x, w))


def test_other_mistakes_do_not_compile() -> None:
    lib, w = lazy(), torch.randn(4)
    lib(torch.randn(3, 4), w)
    for wrong in (torch.randn(3, 4).double(), torch.randn(3, 4, 1), torch.randn(5, 4).double()):
        with pytest.raises(InputError, match="x"):
            lib(wrong, w)
    assert len(lib.compiles) == 1
    check(lib, block, torch.randn(3, 4), w)


def test_before_the_first_call(tmp_path: Path) -> None:
    lib = lazy()
    for use in (
        lambda: lib.export(tmp_path / "x.so"),
        lib.explain,
        lambda: lib.scoreboard(),
        lambda: lib.signature,
    ):
        with pytest.raises(LibraryError, match="nothing is compiled yet: call it once"):
            use()
    assert not (tmp_path / "x.so").exists()


def test_after_a_call_it_is_its_library(tmp_path: Path) -> None:
    lib, w = lazy(), torch.randn(4)
    x = torch.randn(3, 4)
    lib(x, w)
    other = tvmcap.load(lib.export(tmp_path / "x.so"))
    torch.testing.assert_close(other(x, w), block(x, w))
    assert lib.manifest == lib.compiled.manifest
    with pytest.raises(AttributeError):
        _ = lib._nothing


def test_options_are_checked_at_once() -> None:
    with pytest.raises(ConfigError):
        tvmcap.build(block, disable=("nothing",))


def test_sizes_equal_by_coincidence_part_when_they_differ() -> None:
    lib = lazy(torch.matmul)
    for n, k, m in ((4, 4, 4), (5, 5, 5), (5, 6, 7), (8, 3, 2), (1, 1, 9)):
        check(lib, torch.matmul, torch.randn(n, k), torch.randn(k, m))
    assert len(lib.compiles) == 3
    assert len(lib.signature.dims) == 3


def test_another_constant_is_refused_whatever_the_size() -> None:
    lib, w = lazy(), torch.randn(4)
    check(lib, lambda x, w: block(x, w, 1.0), torch.randn(3, 4), w)
    for rows in (3, 5):
        with pytest.raises(InputError):
            lib(torch.randn(rows, 4), w, 2.0)
    assert len(lib.compiles) == 1


def test_a_compile_that_fails_leaves_the_library_as_it_was() -> None:
    def fixed(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, 2) + 1

    lib = lazy(fixed)
    check(lib, fixed, torch.randn(4))
    with pytest.raises(tvmcap.errors.TvmcapError):
        lib(torch.randn(5))
    check(lib, fixed, torch.randn(4))
    assert len(lib.compiles) == 1


def test_it_says_in_a_line_what_it_is() -> None:
    lib = lazy()
    assert repr(lib) == "<block: not compiled yet>"
    lib(torch.randn(3, 4), torch.randn(4))
    assert repr(lib).startswith("<block: ") and "\n" not in repr(lib) and len(repr(lib)) < 200
