"""What the tests of quantized builds share: a build for this CPU, seeded data, and its error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tvmcap


def build(model: Any, x: torch.Tensor, folder: Path, **options: Any) -> Any:
    """Build a model of one input, with its own cache; its rows are dynamic by default.

    That costs a build twice the time of ``dynamic=None``.
    """
    common = {"target": "llvm", "dynamic": {0: {0: "B"}}, "verify": False, "tune": "none"}
    return tvmcap.build(model.eval(), (x,), **{**common, "cache_dir": str(folder), **options})


def data(*shape: int, seed: int) -> torch.Tensor:
    """Return normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sqnr_db(want: torch.Tensor, got: torch.Tensor) -> float:
    """Return the signal over the noise of ``got``, in dB."""
    want, got = want.double(), got.double().cpu()
    return float(10 * torch.log10(want.square().sum() / (want - got).square().sum()))
