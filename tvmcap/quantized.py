"""Quantization of one model: calibrate, choose, rewrite, and measure what it costs.

The model runs on this machine's CPU, before and after, whatever the target: integer sums are the
same everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax

from tvmcap import pipeline
from tvmcap.base.codegen import make_target
from tvmcap.base.config import Config
from tvmcap.base.errors import AccuracyError, QuantizeError
from tvmcap.base.numerics import to_numpy
from tvmcap.base.quantization import MAX_K, Quantize
from tvmcap.base.ranges import Range, Ranges, Samples
from tvmcap.capture.export import Captured
from tvmcap.graph.layers import Layer, layers
from tvmcap.graph.quantize import Plan, quantize
from tvmcap.library import plain
from tvmcap.verify import calibrate, samples
from tvmcap.verify.accuracy import AccuracyReport, LayerNoise, Noise, report
from tvmcap.verify.check import example_leaves
from tvmcap.view import accuracy

log = logging.getLogger("tvmcap")

Leaves = Sequence[torch.Tensor]

#: CUDA architectures before this one have no conversion from and to e4m3.
_FP8_SINCE = 89


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
        found = layers(mod, self._name_of)
        chosen = choose(found, self.options)
        seen, held_out, source = self._inputs()
        self._check_calibration(chosen, seen)
        before = Program(quantize(mod, {}, found, [v for x in found for v in (x.x, x.y)]))
        given = self.config.calibration
        if isinstance(given, Ranges):
            self.ranges = given
        elif self.options.needs_calibration:
            self.ranges = Ranges(self._calibrate(before, found, chosen, seen))
        baseline = [before(leaves) for leaves in held_out]
        kept = set(self.ranges.kept) if self.options.auto else set()
        while True:
            plans = make_plans([x for x in chosen if x.name not in kept], self.options, self.ranges)
            self.report = self._measure(mod, found, plans, held_out, baseline, source)
            worst = self._worst(plans, self.report)
            if worst is None or not self.options.auto or isinstance(given, Ranges):
                break
            kept.add(worst)
            log.info("layer %s is left as it is: the budget is not met with it in 8 bits", worst)
        self.ranges = replace(self.ranges, kept=tuple(x.name for x in chosen if x.name in kept))
        self._judge(self.report, plans)
        made = {name: replace(plan, offset=self.offset) for name, plan in plans.items()}
        return quantize(mod, made, found)

    def _check_calibration(self, chosen: Sequence[Layer], seen: Sequence[Leaves]) -> None:
        """Raise QuantizeError where the scheme needs inputs or ranges that are not there."""
        given, options = self.config.calibration, self.options
        if isinstance(given, Ranges):
            make_plans(chosen, options, given)
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
                "auto=True choose them, or lower budget_db"
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

    def _inputs(self) -> tuple[list[Leaves], list[Leaves], str]:
        """Return inputs to calibrate on, inputs to measure on, and what the latter are."""
        signature, given = self.captured.signature, self.config.calibration
        args = given.inputs if isinstance(given, Samples) else ()
        leaves = [samples.leaves(signature, one, i) for i, one in enumerate(args)]
        seen, held_out = samples.split(leaves)
        seen = samples.spread(signature, seen)
        if held_out:
            return seen, held_out, "inputs held out of calibration"
        drawn = samples.drawn(signature, example_leaves(self.captured), self.config.seed)
        return seen, drawn, "sets of inputs drawn like the example"

    def _calibrate(
        self, before: Program, found: list[Layer], chosen: list[Layer], seen: Sequence[Leaves]
    ) -> dict[str, Range]:
        """Return the range of each chosen layer's input over the inputs ``seen``."""

        def observe(smooth: Mapping[str, Sequence[float]]) -> dict[str, Range]:
            observers = {x.name: self._observer(x) for x in chosen}
            for number, leaves in enumerate(seen):
                inputs = before(leaves)[-2 * len(found) :: 2]
                for layer, x in zip(found, inputs, strict=True):
                    if layer.name in observers:
                        divisor = np.asarray(smooth.get(layer.name, 1.0), np.float32)
                        observers[layer.name].see(x / divisor, number)
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
        specs = self.captured.signature.outputs
        floats = [i for i, o in enumerate(specs) if o.dtype.startswith(("float", "bfloat"))]
        outputs = {specs[i].name: Noise() for i in floats}
        each = [LayerNoise(x, plans.get(x.name)) for x in found]
        here = {name: replace(plan, offset=self.offset_here) for name, plan in plans.items()}
        after = Program(quantize(mod, here, found, [x.y for x in found]))
        for leaves, want in zip(inputs, baseline, strict=True):
            got = after(leaves)
            for i in floats:
                outputs[specs[i].name].add(want[i], got[i])
            ends = want[len(specs) :]
            for layer, x, y, own in zip(
                each, ends[::2], ends[1::2], got[len(specs) :], strict=True
            ):
                layer.add(x, y, own)
        return report(each, outputs, self.options.budget_db, len(inputs), source)

    def _name_of(self, weight: Any) -> str | None:
        """Find the frozen tensor that a weight is, as it is or, of a product [K, N], transposed."""
        wide = np.asarray(weight, np.float32)
        for name, tensor in self.captured.weights.items():
            if tensor.ndim != wide.ndim or not tensor.is_floating_point():
                continue
            for seen in (tensor, tensor.t()) if wide.ndim == 2 else (tensor,):
                if tuple(seen.shape) != wide.shape:
                    continue
                first = to_numpy(seen[0]).astype(np.float32)
                if np.array_equal(first, wide[0]) and np.array_equal(to_numpy(seen), wide):
                    return name
        return None


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


def check_target(options: Quantize, target: Any) -> None:
    """Raise QuantizeError where the target cannot compute with the scheme."""
    if target.kind.name != "cuda" or options.dtype != "float8_e4m3fn":
        return
    arch = str(target.attrs.get("arch", ""))
    number = int("".join(c for c in arch if c.isdigit()) or 0)
    if number < _FP8_SINCE:
        raise QuantizeError(
            f"quantize={options.scheme!r}: {arch} has no e4m3, which starts at sm_{_FP8_SINCE}; "
            "use 'int8'"
        )


def choose(found: Sequence[Layer], options: Quantize) -> list[Layer]:
    """Return the layers to quantize; raises QuantizeError where there is none, or one cannot be."""
    if not found:
        raise QuantizeError(
            "nothing to quantize: no product or convolution in this model has a constant weight; "
            "the parameters of a module are constant, arguments where constants=('w',) names them"
        )
    if options.dtype != "int8":
        found = [x for x in found if x.conv is None]
        if not found:
            raise QuantizeError(
                f"nothing to quantize: {options.scheme!r} is for products, and this model has only "
                "convolutions; use 'int8'"
            )
    names = ", ".join(x.name for x in found)
    for pattern in options.keep:
        if not any(replace(options, keep=(pattern,)).keeps(x.name) for x in found):
            raise QuantizeError(f"quantize: keep={pattern!r} names no layer; layers: {names}")
    chosen = [x for x in found if not options.keeps(x.name)]
    if not chosen:
        raise QuantizeError(f"nothing to quantize: keep={options.keep} names every layer: {names}")
    exact = options.dtype == "int8" and not options.weight_only
    long = [x for x in chosen if exact and x.k > MAX_K]
    if long and not options.auto:
        raise QuantizeError(
            f"layer {long[0].name!r} sums {long[0].k} products of int8, and int32 holds at most "
            f"{MAX_K}; keep it: keep=({long[0].name!r},)"
        )
    left_out = {x.name for x in long}
    return [x for x in chosen if x.name not in left_out]


def smoothed(
    chosen: Sequence[Layer], options: Quantize, ranges: Mapping[str, Range]
) -> dict[str, tuple[float, ...]]:
    """Return what each product's input is divided by; products of one input share it."""
    if options.smooth is None:
        return {}
    together: dict[Any, list[Layer]] = {}
    for layer in chosen:
        if layer.conv is None:
            together.setdefault(layer.x, []).append(layer)
    found = {}
    for group in together.values():
        seen = [ranges[x.name] for x in group]
        shared = calibrate.smoothing(seen, [x.values() for x in group], options.smooth)
        found.update({x.name: shared for x in group})
    return found


def make_plans(chosen: Sequence[Layer], options: Quantize, ranges: Ranges) -> dict[str, Plan]:
    """Return the plan of each layer; raises QuantizeError where ranges lack what it needs."""
    for layer in chosen if options.needs_calibration else ():
        seen = ranges.layers.get(layer.name)
        smooth = options.smooth is not None and layer.conv is None
        if seen is None or (smooth and len(seen.channels) != layer.k):
            raise QuantizeError(
                f"the given ranges do not cover layer {layer.name!r} as this scheme needs; "
                "calibrate again with the same quantize option"
            )
    divisors = smoothed(chosen, options, ranges.layers)
    static = options.activations == "static"
    return {
        x.name: Plan(
            options.dtype,
            options.weight_only,
            ranges.layers[x.name].clip if static else None,
            divisors.get(x.name, ()),
        )
        for x in chosen
    }
