"""Which layers are quantized, and how: what options, ranges and the target make of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tvmcap.base.errors import QuantizeError
from tvmcap.base.quantization import MAX_K, Quantize
from tvmcap.base.ranges import Range, Ranges
from tvmcap.graph.layers import Layer
from tvmcap.graph.quantize import Plan
from tvmcap.verify import calibrate

#: CUDA architectures before this one have no conversion from and to e4m3.
_FP8_SINCE = 89


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
            "nothing to quantize: this model has no product of rows and a constant matrix, and no "
            "convolution with a constant weight, in 16 or 32 bits; the parameters of a module are "
            "constant, arguments where constants=('w',) names them"
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
    wild = [x for x in chosen if not np.isfinite(x.values()).all()]
    if wild and not options.auto:
        raise QuantizeError(
            f"the weight of layer {wild[0].name!r} holds NaN or Inf, which no scale covers; mend "
            f"it, or keep the layer: keep=({wild[0].name!r},)"
        )
    left_out = {x.name for x in (*long, *wild)}
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


def check_ranges(
    found: Sequence[Layer], chosen: Sequence[Layer], options: Quantize, ranges: Ranges
) -> None:
    """Raise QuantizeError where given ranges are of another model, or made for another scheme.

    ``found`` are all layers of the model, ``chosen`` those that the scheme is for.
    """
    known = [x.name for x in found]
    for name in (*ranges.layers, *ranges.kept):
        if name not in known:
            raise QuantizeError(
                f"the given ranges are of another model: they name layer {name!r}, and this one "
                f"has {', '.join(known)}; calibrate on inputs of this model"
            )
    if options.clipping and dict(ranges.clipping) != options.clipping:
        raise QuantizeError(
            f"the given ranges have static clips for {dict(ranges.clipping) or 'no such scheme'}, "
            f"and this build asks for {options.clipping}; calibrate again with the same quantize "
            "option"
        )
    needed = {x.name for x in chosen} | {*ranges.layers}
    for layer in found if options.needs_calibration else ():
        seen = ranges.layers.get(layer.name)
        smooth = options.smooth is not None and layer.conv is None
        short = seen is None or (smooth and len(seen.channels) != layer.k)
        if layer.name in needed and short:
            raise QuantizeError(
                f"the given ranges do not cover layer {layer.name!r} as this scheme needs; "
                "calibrate again with the same quantize option"
            )


def make_plans(
    found: Sequence[Layer], chosen: Sequence[Layer], options: Quantize, ranges: Ranges
) -> dict[str, Plan]:
    """Return the plan of each chosen layer, but for those that ``ranges`` keep as they are.

    All layers that ``ranges`` cover have a say in what their input is divided by, those kept too:
    it is on these quotients that the clips were found.
    """
    covered = [x for x in found if x.name in ranges.layers]
    divisors = smoothed(covered, options, ranges.layers)
    static = options.activations == "static"
    return {
        x.name: Plan(
            options.dtype,
            options.weight_only,
            ranges.layers[x.name].clip if static else None,
            divisors.get(x.name, ()),
        )
        for x in chosen
        if x.name not in ranges.kept
    }
