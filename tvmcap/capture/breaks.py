"""Where torch.compile cannot capture a function as one graph, and what to do about each place."""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tvmcap.base.errors import CaptureError
from tvmcap.capture import source, tracing

_ADVICE = (
    (
        "generic_jump",
        "a branch on the value of a tensor",
        "use torch.where, which computes both sides, or decide outside the function",
    ),
    (
        r"Tensor\.item",
        "a number taken out of a tensor",
        "keep it a tensor; where it must be a number, set "
        "torch._dynamo.config.capture_scalar_outputs = True",
    ),
    (
        r"print|logging",
        "output in the middle of the function",
        "print before or after it, or under `if not torch.compiler.is_compiling()`",
    ),
)
_OTHER = "move this line out of the compiled function, or write it with PyTorch operators"


@dataclass(frozen=True)
class Break:
    """One graph break.

    Attributes
    ----------
    reason: what Dynamo could not trace.
    file, line, code: the user's line.
    advice: what to do about it.
    """

    reason: str
    file: str
    line: int
    code: str
    advice: str

    def __str__(self) -> str:
        """Say where, why and what to do, one a line."""
        return f"{self.file}:{self.line}: {self.code}\n    {self.reason}\n    {self.advice}"


@dataclass(frozen=True)
class CaptureReport:
    """How torch.compile captures a function.

    Attributes
    ----------
    graphs: how many graphs it becomes; 1 where nothing breaks.
    operators: how many operators they hold together.
    breaks: where one graph ends and the next begins.
    """

    graphs: int
    operators: int
    breaks: tuple[Break, ...]

    def __str__(self) -> str:
        """List the breaks."""
        counts = (self.graphs, "graph"), (self.operators, "operator")
        what = " of ".join(f"{n} {name}{'s' * (n != 1)}" for n, name in counts)
        if not self.breaks:
            return f"{what}, no breaks"
        listed = "\n".join(f"{i}. {found}" for i, found in enumerate(self.breaks, 1))
        return f"{what}, {len(self.breaks)} break{'s' * (len(self.breaks) != 1)}:\n{listed}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)


def explain_capture(
    fn: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> CaptureReport:
    """List the graph breaks of a function or an nn.Module under torch.compile.

    The function runs once on ``args`` and ``kwargs`` (with its side effects), and Dynamo forgets
    what it compiled before. Raises CaptureError where the function itself fails.
    """
    if not callable(fn):
        raise CaptureError(f"expected a function or an nn.Module, got a {type(fn).__name__}")
    if isinstance(args, torch.Tensor):
        args = (args,)
    dynamo: Any = torch._dynamo
    with _quiet():
        try:
            found = dynamo.explain(fn)(*args, **(kwargs or {}))
        except Exception as e:
            raise CaptureError(_failure(e)) from e
        finally:
            dynamo.reset()
    breaks = dict.fromkeys(_break(reason) for reason in found.break_reasons if reason.graph_break)
    nodes = [node for graph in found.graphs for node in graph.graph.nodes]
    operators = sum(node.op.startswith("call_") for node in nodes)  # methods and modules, too
    return CaptureReport(found.graph_count, operators, tuple(breaks))


def _failure(error: Exception) -> str:
    """Say where a function failed, and why."""
    text = str(error)
    frames = re.findall(r'File "([^"]+)", line (\d+)', text.partition("from user code:")[2])
    line = ":".join(frames[-1]) if frames else source.of_error(error.__traceback__)
    explained = re.search(r"Explanation: (.*)", text)
    why = explained[1] if explained else source.first_line(error)
    at = f" at {line}" if line else ""
    return (
        f"the function failed{at}: {type(error).__name__}: {why}. Check that it runs on these "
        "arguments"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Dynamo from logging what the report says."""
    log = logging.getLogger("torch._dynamo")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with tracing.quiet():
            yield
    finally:
        log.setLevel(before)


def _break(found: Any) -> Break:
    text = str(found.reason)
    frame = found.user_stack[-1] if found.user_stack else traceback.FrameSummary("?", 0, "?")
    explained = re.search(r"Explanation: (.*)", text)
    hints = [h for h in re.findall(r"Hint: (.*)", text) if "report an issue" not in h]
    reason, advice = (explained[1] if explained else text.splitlines()[0]).strip(), ""
    for pattern, said, ours in _ADVICE:
        if re.search(pattern, text.partition("Developer debug context")[0]):
            reason, advice = said if pattern == "generic_jump" else reason, ours
            break
    advice = advice or " ".join(hints) or _OTHER
    return Break(reason, frame.filename, frame.lineno or 0, (frame.line or "").strip(), advice)
