"""What users ask to be built: right behaviour, or an error that says where and what to do."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.libs import quick
from tvmcap.base.errors import (
    CaptureError,
    ConfigError,
    DataDependentError,
    MutationError,
    RecordError,
    UnsupportedOperatorError,
)


@pytest.mark.parametrize("rows", [0, 1])
def test_an_example_batch_of_none_or_one(rows: int) -> None:
    lib = quick(lambda x: (x * 2).sum(1), torch.zeros(rows, 4), dynamic={"x": {0: "B"}})
    for n in (0, 1, 5):
        x = torch.randn(n, 4)
        torch.testing.assert_close(lib(x), (x * 2).sum(1))


def branches(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x + 1
    return x - 1


def test_a_branch_on_data() -> None:
    with pytest.raises(DataDependentError, match=r"test_bad_program\.py:\d+.*torch\.where"):
        quick(branches, torch.ones(3, 4))


def test_a_branch_on_a_size() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 10 else x - 1

    with pytest.raises(CaptureError, match="B"):
        quick(fn, torch.ones(3, 4), dynamic={"x": {0: "B"}})


def test_operators_without_a_lowering_are_listed_at_once() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.linalg.eigvalsh(x @ x.T)
        z = torch.special.bessel_j0(x)
        return torch.special.bessel_j0(z).sum() + y.sum()

    with pytest.raises(UnsupportedOperatorError) as caught:
        quick(fn, torch.randn(4, 4))
    text = str(caught.value)
    assert "bessel_j0" in text and "(2x)" in text and "eigh" in text
    assert text.count("test_bad_program.py:") >= 3


@torch.library.custom_op("tvmcap_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_custom_operator_without_a_registration() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"tvmcap_tests\.twice.*(?s:.*)register_op"):
        quick(lambda x: twice(x) + 1, torch.randn(4))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x
        return x + self.seen


def test_a_buffer_changed_in_forward() -> None:
    model = Counter()
    with pytest.raises(MutationError, match=r"seen.*in place"):
        quick(model, torch.ones(4))
    assert torch.equal(model.seen, torch.zeros(4))


def test_an_argument_changed_in_place() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * 2

    with pytest.raises(MutationError, match=r"x.*in place"):
        quick(fn, torch.ones(4))


def test_arguments_that_do_not_fit_the_function() -> None:
    with pytest.raises(CaptureError, match="arguments do not fit"):
        quick(branches, torch.ones(3), torch.ones(3))
    with pytest.raises(CaptureError, match="could not trace"):
        quick(lambda x, y: x @ y, torch.ones(3, 4), torch.ones(3, 4))


def test_dimensions_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="axis 2 does not exist"):
        quick(branches, torch.ones(3, 4), dynamic={"x": {2: "B"}})
    with pytest.raises(ConfigError, match="equal names are equal sizes"):
        quick(
            lambda x, y: (x, y),
            torch.ones(3),
            torch.ones(4),
            dynamic={"x": {0: "B"}, "y": {0: "B"}},
        )


def test_no_target() -> None:
    with pytest.raises(ConfigError, match="use 'llvm', 'cuda'"):
        quick(branches, torch.ones(3), target="tpu")


# ---- folders and files


def test_a_log_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "logs")
    lib = quick(
        lambda x: x.exp() - 5, torch.ones(3), log_dir=folder, tune="cached"
    )  # reading needs no folder
    assert torch.allclose(lib(torch.ones(3)), torch.ones(3).exp() - 5)
    with pytest.raises(RecordError, match=r"(?s)cannot write tuning records.*log_dir"):
        quick(torch.matmul, torch.ones(4, 8), torch.ones(8, 8), log_dir=folder, tune=2, budget_s=20)


def test_corrupt_records_are_counted_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = b'garbage\n\n{"kind": "template", "sum": "0"}\n\xff\xfe\n[1, 2\n'
    (tmp_path / "records.jsonl").write_bytes(bad)
    with caplog.at_level(logging.WARNING, "tvmcap"):
        lib = quick(lambda x: x.exp() - 6, torch.ones(3), log_dir=str(tmp_path), tune="cached")
    assert "4 lines are no records; kept and not used" in caplog.text
    assert (tmp_path / "records.jsonl").read_bytes() == bad
    assert torch.allclose(lib(torch.ones(3)), torch.ones(3).exp() - 6)


def test_a_cache_folder_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    lib = quick(lambda x: x.exp() - 7, torch.ones(3), cache_dir=str(tmp_path / "file" / "cache"))
    assert "set cache_dir" in caplog.text
    assert torch.allclose(lib(torch.ones(3)), torch.ones(3).exp() - 7)


def test_a_damaged_library_in_the_cache_is_built_again(tmp_path: Path) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.exp() - 8

    first = quick(fn, torch.ones(3), cache_dir=str(tmp_path))
    whole = first.path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:100] + bytes(200) + whole[300:]):
        first.path.unlink()  # a mapped file must not change under its library
        first.path.write_bytes(damaged)
        again = quick(fn, torch.ones(3), cache_dir=str(tmp_path))
        assert not again.from_cache and torch.allclose(
            again(torch.ones(3)), torch.ones(3).exp() - 8
        )
    assert quick(fn, torch.ones(3), cache_dir=str(tmp_path)).from_cache
