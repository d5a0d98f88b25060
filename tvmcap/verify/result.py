"""What verification found: one check a set of inputs, and the report of them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvmcap.base.errors import VerifyError
from tvmcap.base.numerics import Comparison


@dataclass(frozen=True)
class Check:
    """One set of inputs: the comparison of each output, or why there was none."""

    kind: str
    sizes: Mapping[str, int]
    outputs: tuple[Comparison, ...] = ()
    skipped: str | None = None
    draws: int = 1
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every output is within its budget."""
        return all(c.ok for c in self.outputs)

    def __str__(self) -> str:
        """Name the inputs and what was measured on them."""
        where = " ".join([self.kind, *(f"{k}={v}" for k, v in self.sizes.items())])
        if self.skipped:
            return f"{where}: skipped, {self.skipped}"
        return f"{where}: " + "; ".join(map(str, self.outputs))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "kind": self.kind,
            "sizes": dict(self.sizes),
            "outputs": [c.to_json() for c in self.outputs],
            "skipped": self.skipped,
            "draws": self.draws,
            "seconds": self.seconds,
            "ok": self.ok,
        }


@dataclass(frozen=True)
class VerifyReport:
    """What verification measured; ``ok`` where something was checked and nothing failed."""

    checks: tuple[Check, ...]
    reference: str
    left_out: int = 0

    @property
    def ok(self) -> bool:
        """Whether at least one set was compared and all are within budget."""
        return any(c.outputs for c in self.checks) and all(c.ok for c in self.checks)

    @property
    def max_abs(self) -> float:
        """Largest absolute error over everything checked."""
        return max((o.max_abs for c in self.checks for o in c.outputs), default=0.0)

    def require(self) -> VerifyReport:
        """Return the report, or raise VerifyError that names the output and its inputs."""
        if self.ok:
            return self
        failed = [c for c in self.checks if not c.ok]
        if not failed:
            reasons = "; ".join(map(str, self.checks)) or "no input sets"
            raise VerifyError(f"nothing could be verified: {reasons}")
        first = failed[0]
        output = next(o for o in first.outputs if not o.ok)
        where = " ".join([first.kind, *(f"{k}={v}" for k, v in first.sizes.items())])
        count = f"{len(failed)} of {len(self.checks)}"
        others = f" ({count} input sets fail)" if len(failed) > 1 else ""
        raise VerifyError(
            f"outside the error budget on {where} inputs{others}:\n  {output}\n"
            f"The reference is the PyTorch code in {self.reference}; the budget is {output.rule}.\n"
            "To find the pass and the operator: "
            "tvmcap.bisect(fn, args). To build without a suspect pass: disable=('NAME',). "
            "To build unverified: verify=False."
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        checks = [c.to_json() for c in self.checks]
        return {
            "ok": self.ok,
            "reference": self.reference,
            "max_abs": self.max_abs,
            "left_out": self.left_out,
            "checks": checks,
        }

    def __str__(self) -> str:
        """One line a set, after a line that says the outcome."""
        outcome = "verified" if self.ok else "NOT verified"
        late = f", {self.left_out} sets left out for time" if self.left_out else ""
        head = f"{outcome} against {self.reference} on {len(self.checks)} input sets{late}"
        return "\n  ".join([head, *map(str, self.checks)])
