"""What the GEMM benchmarks share: the shapes, the fused block, and settings as files hold them.

The block is ``gelu_tanh(x @ w.T + b)`` in bf16 with x [M, K] and w [N, K] ("nk") or [K, N] ("kn").
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MAX_ROWS = 8192


class Shape(NamedTuple):
    """Rows of x, the reduction, columns of the output."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        """Spell as the command line does."""
        return f"{self.m}x{self.k}x{self.n}"


#: The five shapes whose vendor times the project started from, then the rest of the suite.
SUITE = tuple(
    Shape(*s)
    for s in (
        *((2048, 1024, 4096), (512, 3072, 12288), (16, 1024, 4096), (8192, 8192, 8192)),
        *((2048, 4096, 4096), (1, 4096, 4096), (1, 4096, 14336), (8, 4096, 14336)),
        *((16, 14336, 4096), (32, 4096, 14336), (32, 8192, 8192), (64, 4096, 4096)),
        *((128, 1024, 4096), (128, 4096, 14336), (256, 4096, 1024), (256, 14336, 4096)),
        *((1000, 1024, 4096), (1000, 4096, 4096), (2048, 4096, 1024), (2048, 4096, 14336)),
        *((2048, 14336, 4096), (4096, 1024, 4096), (4096, 4096, 4096), (4096, 3072, 12288)),
        *((8192, 1024, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (2049, 1000, 4104)),
        (333, 768, 3072),
    )
)


def parse_shapes(text: str | None) -> tuple[Shape, ...]:
    """Read ``2048x1024x4096,16x1024x4096``; None is the suite."""
    if text is None:
        return SUITE
    shapes = []
    for part in text.split(","):
        numbers = part.strip().split("x")
        if len(numbers) != 3 or not all(p.isdecimal() and int(p) > 0 for p in numbers):
            raise SystemExit(f"--shapes {part!r}: expected MxKxN, such as 2048x1024x4096")
        shapes.append(Shape(*map(int, numbers)))
    return tuple(shapes)


@functools.cache
def target() -> Any:
    """Return the target that the kernels are compiled for."""
    from tvmcap.base import codegen

    return codegen.make_target({"kind": "cuda", "arch": "sm_90a"})


def target_json() -> dict[str, Any]:
    """Return the target as a build request holds it."""
    from tvmcap.kernel import process

    return process.target_json(target())


def shipped() -> Path:
    """Return the folder of the tuning records for GPUs that ship with tvmcap."""
    return Path(__file__).resolve().parent.parent / "tuning_logs" / "cuda"


def fused(fn: Any, args: Mapping[str, Any], quantize: Any = None) -> Any:
    """Return the fused module of a function, as ``build`` and ``tune`` make it.

    ``args`` are example tensors by name, in order; x and r have up to ``MAX_ROWS`` rows.
    """
    import tvmcap
    from tvmcap import pipeline
    from tvmcap.base.config import make_config
    from tvmcap.capture.export import capture

    dynamic = {n: {0: tvmcap.Dim("B", max=MAX_ROWS)} for n in args if n in ("x", "r")}
    config = make_config(None, target="cuda:sm_90a", dynamic=dynamic)
    mod = capture(fn, tuple(args.values()), None, config).mod
    passes = pipeline.front(target(), config.allow_tf32, quantize=quantize)
    return pipeline.run(mod, passes, target(), config, pipeline.Trace())


@functools.cache
def block(k: int, n: int, layout: str = "nk") -> Any:
    """Return the block as one fused PrimFunc, its rows symbolic, the sum kept in float32."""
    from tvm import relax, te, tirx

    from tvmcap.graph.fuse import fuse, legalize

    def matmul(x: te.Tensor, w: te.Tensor) -> te.Tensor:
        """``x @ w.T`` as one operator, which TVM lacks."""
        r = te.reduce_axis((0, k), name="k")
        return te.compute(
            (x.shape[0], n),
            lambda i, j: te.sum(x[i, r].astype("float32") * w[j, r].astype("float32"), axis=r),
            name="matmul",
        )

    builder = relax.BlockBuilder()
    shapes = {"x": (tirx.Var("B", "int64"), k), "w": (n, k) if layout == "nk" else (k, n)}
    x, w, b = (
        relax.Var(name, relax.TensorType(shape, "bfloat16"))
        for name, shape in {**shapes, "b": (n,)}.items()
    )
    with builder.function("main", [x, w, b]):
        with builder.dataflow():
            if layout == "nk":
                y = builder.emit_te(matmul, x, w, primfunc_name_hint="matmul")
            else:
                y = builder.emit(relax.op.matmul(x, w, out_dtype="float32"))
            y = builder.emit(relax.op.add(y, builder.emit(relax.op.astype(b, "float32"))))
            y = builder.emit(relax.op.nn.gelu_tanh(y))
            y = builder.emit_output(relax.op.astype(y, "bfloat16"))
        builder.emit_func_output(y)
    with target():
        mod = fuse(legalize(builder.get()))
    (func,) = (f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
    return func


@dataclasses.dataclass(frozen=True)
class Setting:
    """A rung's name and one setting of its knobs, for M from ``min_m`` to ``max_m``."""

    rung: str
    knobs: Any
    min_m: int = 0
    max_m: int = 1 << 62


def read_settings(path: Path | None, knobs: type) -> tuple[list[Setting], list[str]]:
    """Read ``[{"rung", "knobs", "min_m", "max_m"}, ...]``; also what could not be read.

    ``knobs`` gives the fields that differ from the defaults of the class; a list is every value of
    it in turn. Without a file the one setting is the default.
    """
    if path is None:
        return [Setting("default", knobs())], []
    found: dict[Setting, None] = {}
    refused = []
    for entry in json.loads(path.read_text()):
        limits = {name: entry[name] for name in ("min_m", "max_m") if name in entry}
        for fields in _every(entry["knobs"]):
            try:
                setting = dataclasses.replace(knobs(), **fields)
            except TypeError as e:
                refused.append(f"{entry['rung']} {fields}: {e}")
                continue
            found[Setting(entry["rung"], setting, **limits)] = None
    return list(found), refused


def _every(fields: dict[str, Any]) -> Iterable[dict[str, Any]]:
    lists = [value if isinstance(value, list) else [value] for value in fields.values()]
    return (dict(zip(fields, values, strict=True)) for values in itertools.product(*lists))


def changed(knobs: Any) -> dict[str, Any]:
    """Return the fields of a setting that differ from the defaults."""
    default = type(knobs)()
    data = dataclasses.asdict(knobs)
    return {name: value for name, value in data.items() if value != getattr(default, name)}
