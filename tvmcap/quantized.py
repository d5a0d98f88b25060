"""Quantization of one model: calibrate, choose, rewrite, and measure what it costs.

The model runs on this machine's CPU, before and after, whatever the target: integer sums are the
same everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax

from tvmcap import pipeline
from tvmcap.base.accuracy import AccuracyReport
from tvmcap.base.codegen import make_target
from tvmcap.base.config import Config
from tvmcap.base.errors import AccuracyError, QuantizeError
from tvmcap.base.numerics import to_numpy
from tvmcap.base.quantization import Quantize
from tvmcap.base.ranges import Range, Ranges, Samples, digest
from tvmcap.capture.export import Captured
from tvmcap.graph.layers import Layer, layers
from tvmcap.graph.quantize import Plan, quantize
from tvmcap.library import plain, weights
from tvmcap.verify import calibrate, samples
from tvmcap.verify.accuracy import LayerNoise, Noise, report, require_finite
from tvmcap.verify.check import example_leaves
from tvmcap.verify.plans import check_ranges, check_target, choose, make_plans, smoothed
from tvmcap.view import accuracy

log = logging.getLogger("tvmcap")

Leaves = Sequence[torch.Tensor]


class Quantizer:
    """The pass that quantizes a captured model.

    Attributes
    ----------
    ranges: of the calibration, once the pass has run; ``report`` what it cost.
    """

    def __init__(self, captured: Captured, config: Config, target: Any) -> None:
        assert isinstance(config.quantize, Quantize)
        self.captured, self.config, self.options = captured, config, config.quantize
        self.ranges = Ranges()
        self.report: AccuracyReport | None = None
        check_target(self.options, target)
        signed = self.options.dtype != "int8" or self.options.weight_only
        self.offset = target.kind.name == "llvm" and not signed
        self.offset_here = not signed

    def __call__(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Ensures chosen products are 8-bit; raises AccuracyError outside the budget."""
        found = layers(mod, self._names_of)
        chosen = choose(found, self.options)
        seen, held_out, source = self._inputs()
        self._check_calibration(found, chosen, seen)
        before = Program(quantize(mod, {}, found, [v for x in found for v in (x.x, x.y)]))
        given = self.config.calibration
        if isinstance(given, Ranges):
            self.ranges = given if self.options.auto else replace(given, kept=())
        elif self.options.needs_calibration:
            ranges = self._calibrate(before, found, chosen, seen)
            self.ranges = Ranges(ranges, clipping=self.options.clipping)
        baseline = [before(leaves) for leaves in held_out]
        for i, spec in self._floats():
            require_finite(spec.name, [outputs[i] for outputs in baseline], source)
        while True:
            plans = make_plans(found, chosen, self.options, self.ranges)
            self.report = self._measure(mod, found, plans, held_out, baseline, source)
            worst = self._worst(plans, self.report)
            if worst is None or not self.options.auto or isinstance(given, Ranges):
                break
            self.ranges = replace(self.ranges, kept=(*self.ranges.kept, worst))
            log.info("layer %s is left as it is: the budget is not met with it in 8 bits", worst)
        made = {name: replace(plan, offset=self.offset) for name, plan in plans.items()}
        quantized = quantize(mod, made, found)
        self.report = replace(
            self.report,
            constants_before=weights.nbytes(mod["main"]),
            constants_after=weights.nbytes(quantized["main"]),
        )
        self._judge(self.report, plans)
        return quantized

    def _check_calibration(
        self, found: Sequence[Layer], chosen: Sequence[Layer], seen: Sequence[Any]
    ) -> None:
        """Raise QuantizeError where the scheme needs inputs or ranges that are not there."""
        given, options = self.config.calibration, self.options
        if isinstance(given, Ranges):
            check_ranges(found, chosen, options, given)
        elif options.needs_calibration and not seen:
            what = "smooth=" if options.smooth is not None else "activations='static'"
            raise QuantizeError(
                f"quantize with {what} needs inputs to calibrate on: pass calibration=[x1, x2, "
                "...], a tensor or a tuple of arguments each, or the path of saved ranges"
            )

    def _judge(self, measured: AccuracyReport, plans: Mapping[str, Plan]) -> None:
        """Log the report, or raise it where an output is outside the budget."""
        if not measured.ok:
            raise AccuracyError(
                f"{accuracy.text(measured)}\nKeep the worst layers as they are (keep=), let "
                "auto=True choose them, or lower budget_db",
                measured,
            )
        if not plans:
            log.warning("no layer can be quantized within %g dB", self.options.budget_db)
        log.info("%s", accuracy.text(measured))

    def to_json(self) -> dict[str, Any]:
        """Return the options, the ranges and the report as plain JSON data."""
        measured = None if self.report is None else self.report.to_json()
        return {
            "options": self.options.to_json(),
            "ranges": self.ranges.to_json(),
            "report": measured,
        }

    def _worst(self, plans: Mapping[str, Plan], measured: AccuracyReport) -> str | None:
        """Name the quantized layer that adds most noise, where the budget is not met."""
        own = {x.name: x.own_db for x in measured.layers if x.own_db is not None}
        worst = min(own, key=lambda name: own[name], default=None)
        if worst is None or worst not in plans:
            return None
        return worst if not measured.ok or own[worst] < self.options.budget_db else None

    def _inputs(self) -> tuple[list[tuple[str, Leaves]], list[Leaves], str]:
        """Return named inputs to calibrate on, inputs to measure on, and what the latter are."""
        signature, given = self.captured.signature, self.config.calibration
        args = given.inputs if isinstance(given, Samples) else ()
        leaves = [samples.leaves(signature, one, i) for i, one in enumerate(args)]
        first, held_out = samples.split(leaves)
        seen = samples.spread(signature, first)
        if held_out:
            what = "input" if len(held_out) == 1 else "inputs"
            return seen, held_out, f"{what} held out of calibration"
        example = example_leaves(self.captured)
        return seen, *samples.of_example(signature, example, self.config.seed)

    def _calibrate(
        self,
        before: Program,
        found: list[Layer],
        chosen: list[Layer],
        seen: Sequence[tuple[str, Leaves]],
    ) -> dict[str, Range]:
        """Return the range of each chosen layer's input over the inputs ``seen``."""

        def observe(smooth: Mapping[str, Sequence[float]]) -> dict[str, Range]:
            observers = {x.name: self._observer(x) for x in chosen}
            for source, leaves in seen:
                inputs = before(leaves)[-2 * len(found) :: 2]
                for layer, x in zip(found, inputs, strict=True):
                    if layer.name in observers:
                        divisor = np.asarray(smooth.get(layer.name, 1.0), np.float32)
                        observers[layer.name].see(x / divisor, source)
            return {name: observer.range() for name, observer in observers.items()}

        ranges = observe({})
        if self.options.smooth is None or self.options.activations != "static":
            return ranges
        smooth = smoothed(chosen, self.options, ranges)
        clips = observe(smooth)
        return {name: replace(r, clip=clips[name].clip) for name, r in ranges.items()}

    def _observer(self, layer: Layer) -> calibrate.Observer:
        options = self.options if layer.conv is None else replace(self.options, smooth=None)
        return calibrate.Observer(layer.name, options)

    def _measure(
        self,
        mod: tvm.IRModule,
        found: list[Layer],
        plans: Mapping[str, Plan],
        inputs: Sequence[Leaves],
        baseline: Sequence[list[Any]],
        source: str,
    ) -> AccuracyReport:
        count, floats = len(self.captured.signature.outputs), self._floats()
        outputs = {spec.name: Noise() for _, spec in floats}
        each = [LayerNoise(x, plans.get(x.name)) for x in found]
        here = {name: replace(plan, offset=self.offset_here) for name, plan in plans.items()}
        after = Program(quantize(mod, here, found, [x.y for x in found]))
        for leaves, want in zip(inputs, baseline, strict=True):
            got = after(leaves)
            for i, spec in floats:
                outputs[spec.name].add(want[i], got[i])
            ends = want[count:]
            for layer, x, y, own in zip(each, ends[::2], ends[1::2], got[count:], strict=True):
                layer.add(x, y, own)
        return report(each, outputs, self.options.budget_db, len(inputs), source)

    def _floats(self) -> list[tuple[int, Any]]:
        """Return the outputs whose noise counts, with their positions."""
        outputs = enumerate(self.captured.signature.outputs)
        return [(i, o) for i, o in outputs if o.dtype.startswith(("float", "bfloat"))]

    def _names_of(self, weight: Any) -> list[str]:
        """Find the frozen tensors that a weight equals or, else, is rows or columns of.

        A matrix [K, N] may stand there transposed.
        """
        wide, tensors = np.asarray(weight, np.float32), self.captured.weights.items()
        return [n for n, t in tensors if _holds(t, wide)] or [
            n for n, t in tensors if _has_columns(t, wide) or _has_columns(t, wide.T)
        ]


def _holds(tensor: torch.Tensor, weight: Any) -> bool:
    """Whether a frozen tensor is the weight, as it is or, where that is a matrix, transposed."""
    if tensor.ndim != weight.ndim or not tensor.is_floating_point():
        return False
    same = partial(np.array_equal, equal_nan=True)
    for seen in (tensor, tensor.t()) if weight.ndim == 2 else (tensor,):
        if tuple(seen.shape) != weight.shape:
            continue
        first = to_numpy(seen[0]).astype(np.float32)
        if same(first, weight[0]) and same(to_numpy(seen), weight):
            return True
    return False


def _has_columns(tensor: torch.Tensor, weight: Any) -> bool:
    """Whether a matrix is some neighbouring columns of a frozen tensor, or of its transpose."""
    if tensor.ndim != 2 or weight.ndim != 2 or not tensor.is_floating_point():
        return False
    length, width = weight.shape
    for seen in (tensor, tensor.t()):
        if seen.shape[0] != length or seen.shape[1] < width:
            continue
        row = to_numpy(seen[0]).astype(np.float32)
        for at in np.flatnonzero(row[: len(row) - width + 1] == weight[0, 0]):
            part = slice(at, at + width)
            if np.array_equal(row[part], weight[0]) and np.array_equal(
                to_numpy(seen[:, part]), weight
            ):
                return True
    return False


class Program:
    """A module after the pass ``fold``, compiled for this machine's CPU."""

    def __init__(self, mod: tvm.IRModule) -> None:
        target = make_target("llvm")
        steps = [*pipeline.front(target), pipeline.back(target, lambda _: [], pipeline.Trace())[0]]
        steps = steps[[name for name, _ in steps].index("fold") + 1 :]
        mod = pipeline.run(mod, steps, target, Config(), pipeline.Trace())
        self.main = relax.VirtualMachine(plain.plain(mod, target), tvm.cpu())["main"]

    def __call__(self, leaves: Leaves) -> list[Any]:
        """Run it and return every output as a numpy array, 16-bit floats in float32."""
        result = self.main(*leaves)
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        return [to_numpy(x) for x in outputs]


def quantizer(captured: Captured, config: Config, target: Any) -> Quantizer | None:
    """Return the pass that ``config`` asks for, or None."""
    return None if config.quantize is None else Quantizer(captured, config, target)


def measured_on(fn: Any, args: Any, kwargs: Any, config: Config) -> str | None:
    """Return a digest of the example inputs where the accuracy of a build is measured on them."""
    given = config.calibration
    held_out = isinstance(given, Samples) and len(given.inputs) > 1
    if config.quantize is None or held_out:
        return None
    return digest([args, kwargs, getattr(fn, "example_inputs", None)])
