"""torch.compile with this project's backend, for tests."""

from __future__ import annotations

from typing import Any

import torch

from tvmcap import dynamo


def compiled(fn: Any, **options: Any) -> Any:
    """Compile without tuning; a module that uses it wants the fixture ``fresh_dynamo``."""
    return torch.compile(fn, backend=dynamo.backend, options={"tune": "none", **options})
