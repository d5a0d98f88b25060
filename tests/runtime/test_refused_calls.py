"""Arguments that do not fit a library: errors that say what to do; and ``out=``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import libs
from tests.runtime.kinds import KINDS
from tvmcap.base.errors import InputError, LibraryError
from tvmcap.runtime.executor import Executor


@pytest.mark.parametrize("kind", ["torch", "numpy", "tvm_ffi"])
@pytest.mark.parametrize(
    ("shapes", "dtype", "message"),
    [
        (((5, 8), (8, 8)), torch.float64, "'x': expected .*float32, got .*float64"),
        (((5, 8), (8, 8)), torch.int32, "float32, got .*int32"),
        (
            ((5, 2, 4), (8, 8)),
            torch.float32,
            r"'x': expected 2 dimensions \[B, 8\], got \[5, 2, 4\]",
        ),
        (((8,), (8, 8)), torch.float32, r"expected 2 dimensions"),
        (
            ((5, 9), (8, 8)),
            torch.float32,
            r"'x': expected size 8 in dimension 1 of \[B, 8\], got \[5, 9\]",
        ),
        (((5, 8), (8, 7)), torch.float32, r"'w': expected size 8"),
        (
            ((4097, 8), (8, 8)),
            torch.float32,
            "dimension 0 of 'x': expected B of at least 0 and at most 4096, got 4097",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    run: Executor, kind: str, shapes: Any, dtype: Any, message: str
) -> None:
    convert = KINDS[kind][0]
    arguments = [convert(torch.ones(shape, dtype=dtype)) for shape in shapes]
    for _ in range(2):  # a refused shape is not remembered as a good one
        with pytest.raises(InputError, match=message):
            run(*arguments)


def test_a_minimum(folder: Path, w: torch.Tensor) -> None:
    run = Executor(
        libs.write_chain(folder / "bounded.so", signature=libs.chain_signature(minimum=2))
    )
    with pytest.raises(InputError, match="expected B of at least 2, got 1"):
        run(torch.rand(1, 8), w)
    run(torch.rand(2, 8), w)


def test_unequal_sizes_of_one_name(nested: Executor) -> None:
    with pytest.raises(
        InputError,
        match=r"'data\.y': expected B = 3 \(the size that dimension 0 of 'data\.x' has\)",
    ):
        nested({"x": torch.rand(3, 8), "y": torch.rand(4, 8)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.rand(5, 8, device="meta"), "expected a tensor on cpu, got one on meta"),
        (lambda: torch.rand(5, 8).to_sparse(), "to_dense"),
        (lambda: torch.rand(5, 8).to_sparse_csr(), "to_dense"),
        (
            lambda: torch.rand(5, 8).as_subclass(type("Mine", (torch.Tensor,), {})),
            "plain torch.Tensor, got Mine",
        ),
        (lambda: torch.nested.nested_tensor([torch.rand(5, 8)], layout=torch.jagged), "expected"),
        (lambda: 3.0, "expected a tensor .*got float"),
        (lambda: None, "got NoneType"),
        (lambda: [[1.0] * 8], "got list"),
        (lambda: "x", "got str"),
    ],
)
def test_what_is_no_usable_tensor(
    run: Executor, w: torch.Tensor, make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(make(), w)
    with pytest.raises(InputError):
        run(w, make())


def test_inside_a_function_transform(run: Executor, w: torch.Tensor) -> None:
    with pytest.raises(InputError, match="'x': expected"):
        torch.vmap(lambda row: run(row, w))(torch.rand(3, 5, 8))


def test_a_nested_tensor(run: Executor, x: torch.Tensor, w: torch.Tensor) -> None:
    nested = torch.nested.nested_tensor([x, x])
    with pytest.raises(InputError, match="'x': expected a dense tensor, got a nested one"):
        run(nested, w)
    run.bind("x", nested)
    run.bind("w", w)
    with pytest.raises(InputError, match="'x': expected a dense tensor, got a nested one"):
        run.run()


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_tensor_whose_memory_was_freed(run: Executor, w: torch.Tensor, position: int) -> None:
    out = torch.empty(8, 8)
    for _ in range(3):
        run(w, w.clone(), out=out)
    tensors = [torch.rand(8, 8), w, out]
    tensors[position].untyped_storage().resize_(0)
    with pytest.raises(InputError, match="expected tensors with memory, got one without"):
        run(*tensors[:2], out=tensors[2])


def test_numbers_of_arguments(run: Executor, x: torch.Tensor, w: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"expected \(x, w\), got no 'w'"):
        run(x)
    with pytest.raises(InputError, match="2 arguments, got 3"):
        run(x, w, w)
    torch.testing.assert_close(run(w=w, x=x), x @ w @ w)


def test_a_tensor_of_another_kind_that_cannot_be_had(
    run: Executor, x: torch.Tensor, w: torch.Tensor
) -> None:
    class Refuses:
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("not today")

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    with pytest.raises(InputError, match=r"'w': expected .* got Refuses; DLPack says: .*not today"):
        run(x, Refuses())


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_memory_that_cannot_be_had(nested: Executor, kind: str) -> None:
    """An exabyte is no error of a kernel."""
    convert = KINDS[kind][0]
    few = convert(torch.ones(1, 8))
    wide = few.expand(1 << 55, 8) if kind == "torch" else np.broadcast_to(few, (1 << 55, 8))
    with pytest.raises(LibraryError, match=r"'data\.x': no memory for a copy.*contiguous"):
        nested({"x": wide, "y": wide})


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_results_that_there_is_no_memory_for(
    chain: Path, kind: str, x: torch.Tensor, w: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, convert = Executor(chain), KINDS[kind][0]
    x, w = convert(x), convert(w)
    run(x, w)
    framework = run._checker._frameworks[type(x)]

    def none(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    for name in ("outputs", "flat"):
        monkeypatch.setattr(framework, name, none)
    with pytest.raises(LibraryError, match=r"no memory on cpu:0 for a call \(sizes {'B': 5}\)"):
        run(x, w)
    run.bind("x", x)
    run.bind("w", w)
    with pytest.raises(LibraryError, match="no memory on cpu:0 for a call"):
        run.run()


# out=


@pytest.mark.parametrize("kind", ["torch", "numpy", "tvm_ffi"])
def test_out(run: Executor, kind: str, x: torch.Tensor, w: torch.Tensor) -> None:
    convert, _, back = KINDS[kind]
    out = convert(torch.full((5, 8), float("nan")))
    assert run(convert(x), convert(w), out=out) is out
    torch.testing.assert_close(back(out), x @ w @ w)


@pytest.mark.parametrize("kind", ["torch", "numpy", "tvm_ffi"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.empty(5, 8, dtype=torch.float64), "out .*float32, got .*float64"),
        (lambda: torch.empty(4, 8), r"expected shape \[5, 8\], got \[4, 8\]"),
        (lambda: torch.empty(40), r"expected shape \[5, 8\], got \[40\]"),
        (lambda: torch.empty(8, 5).t(), "contiguous"),
        (lambda: torch.empty(41)[1:].view(5, 8), "aligned to 16 bytes"),
    ],
)
def test_an_out_that_does_not_fit(
    run: Executor,
    kind: str,
    x: torch.Tensor,
    w: torch.Tensor,
    make: Callable[[], Any],
    message: str,
) -> None:
    convert = KINDS[kind][0]
    with pytest.raises(InputError, match=message):
        run(convert(x), convert(w), out=convert(make()))


def test_other_refused_outs(run: Executor, w: torch.Tensor) -> None:
    x = torch.rand(8, 8)
    with pytest.raises(InputError, match="memory of its own"):
        run(x, w, out=x)
    memory = torch.rand(100)
    with pytest.raises(InputError, match="memory of its own"):
        run(memory[:64].view(8, 8), w, out=memory[32:96].view(8, 8))
    with pytest.raises(InputError, match="does not require grad"):
        run(x, w, out=torch.empty(8, 8, requires_grad=True))
    with pytest.raises(InputError, match=r"torch\.Tensor, as the inputs are"):
        run(x, w, out=np.empty((8, 8), np.float32))
    frozen = np.empty((8, 8), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(InputError, match="writable"):
        run(x.numpy(), w.numpy(), out=frozen)
