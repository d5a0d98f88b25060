"""Score: what a library costs and gains, one field a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Latency:
    """Microseconds of one call: median, 10th and 90th percentile, and the raw samples."""

    median: float
    p10: float
    p90: float
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class KernelScore:
    """One kernel of a call: its name, HBM bytes read and written, and what scheduled it."""

    name: str
    read_bytes: int
    write_bytes: int
    scheduled_by: str


@dataclass(frozen=True)
class Score:
    """The scoreboard of one library at one set of sizes.

    A field that this machine cannot measure is None.

    Attributes
    ----------
    kernels: kernels launched by one call, counted in the module.
    kernels_traced: calls of kernels that an instrumented run made; None where it could not run.
    hbm_bytes: bytes the kernels read and write, each kernel's tensors counted once.
    activation_traffic: bytes of activations moved, over the bytes of the output.
    weight_bytes: bytes of frozen weights.
    peak_bytes_planned, peak_bytes_measured: memory of intermediates and outputs alive at once.
    latency_us, eager_us, torch_compile_us: microseconds a call, measured interleaved.
    speedup: eager's median over ours.
    build_s: seconds the build took.
    tuned_tasks, tasks: how many of the tasks a record serves.
    verified: whether the result was compared with a reference here.
    eager_parts: operators that stayed in PyTorch.
    eager_kernels, eager_hbm_bytes, eager_activation_traffic: the same counts for eager PyTorch.
    """

    sizes: dict[str, int]
    kernels: int | None
    hbm_bytes: int | None
    activation_traffic: float | None
    weight_bytes: int | None
    peak_bytes_planned: int | None
    peak_bytes_measured: int | None = None
    latency_us: Latency | None = None
    eager_us: Latency | None = None
    torch_compile_us: Latency | None = None
    speedup: float | None = None
    build_s: float | None = None
    tuned_tasks: int = 0
    tasks: int = 0
    verified: bool | None = None
    eager_parts: tuple[str, ...] = ()
    kernels_traced: int | None = None
    eager_kernels: int | None = None
    eager_hbm_bytes: int | None = None
    eager_activation_traffic: float | None = None
    per_kernel: tuple[KernelScore, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; ``from_json`` is its inverse."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Score:
        """Read what ``to_json`` wrote, ignoring unknown fields."""
        known = {f.name: data[f.name] for f in fields(Score) if f.name in data}
        for name in ("latency_us", "eager_us", "torch_compile_us"):
            if known.get(name) is not None:
                latency = dict(known[name])
                known[name] = Latency(**{**latency, "samples": tuple(latency.get("samples", ()))})
        known["eager_parts"] = tuple(known.get("eager_parts", ()))
        known["per_kernel"] = tuple(KernelScore(**k) for k in known.get("per_kernel", ()))
        return Score(**known)
