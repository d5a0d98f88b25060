"""An exported program that can be cut off after any of its operators, for bisection."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tvmcap.base.signature import Signature, flatten, unflatten


@dataclass(frozen=True)
class Operator:
    """The operator that fails first: its name in the exported graph, what it is, and its source."""

    name: str
    target: str
    line: str


@dataclass(frozen=True)
class Cut:
    """An exported program on flat inputs, and its nodes that are float tensors, in order."""

    graph: torch.fx.GraphModule
    leaves: list[torch.Tensor]
    nodes: list[torch.fx.Node]

    @staticmethod
    def of(
        fn: Callable[..., Any],
        signature: Signature,
        keywords: tuple[str, ...],
        leaves: list[torch.Tensor],
    ) -> Cut:
        """Export ``fn``, called as ``signature`` says, at the sizes of ``leaves``."""

        class Flat(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                if isinstance(fn, torch.nn.Module):
                    self.fn = fn

            def forward(self, *tensors: torch.Tensor) -> list[Any]:
                values = unflatten(signature.in_tree, list(tensors))
                count = len(values) - len(keywords)
                named = dict(zip(keywords, values[count:], strict=True))
                return flatten(signature.out_tree, fn(*values[:count], **named))

        with torch.no_grad():
            program = torch.export.export(Flat().eval(), tuple(leaves))
            graph: Any = program.module(check_guards=False)
        nodes = [n for n in graph.graph.nodes if n.op == "call_function" and _is_value(n)]
        return Cut(graph, leaves, nodes)

    def until(self, index: int) -> torch.fx.GraphModule:
        """Return the program that stops after node ``index`` and returns its value."""
        copy: Any = torch.fx.Graph()
        kept: dict[Any, Any] = {}
        for node in self.graph.graph.nodes:
            kept[node] = copy.node_copy(node, lambda n: kept[n])
            if node is self.nodes[index]:
                copy.output(kept[node])
                break
        module: Any = torch.fx.GraphModule(self.graph, copy)
        module.graph.eliminate_dead_code()
        module.recompile()
        return module.eval()

    def describe(self, index: int) -> Operator:
        """Name the operator, and the last line outside PyTorch that led to it."""
        node = self.nodes[index]
        trace = [s.strip() for s in str(node.meta.get("stack_trace") or "").splitlines()]
        files = [i for i, s in enumerate(trace) if s.startswith("File ")]
        home = os.path.dirname(torch.__file__)
        users = [i for i in files if home not in trace[i]] or files
        line = " ".join(trace[users[-1] : users[-1] + 2]) if users else ""
        return Operator(node.name, str(node.target), line)


def _is_value(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return floats and node.target is not operator.getitem
