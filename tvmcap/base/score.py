"""Score: what a library costs and gains, one field a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def __str__(self) -> str:
        """Return a table for people: a line a quantity, ours beside eager and torch.compile."""
        sides = (self.latency_us, self.eager_us, self.torch_compile_us)

        def times(name: str) -> list[float | None]:
            return [None if t is None else float(getattr(t, name)) for t in sides]

        ours, *_ = medians = times("median")
        ratios = [None if not (ours and m) else m / ours for m in medians]
        traffic = [self.activation_traffic, self.eager_activation_traffic]
        rows: list[tuple[str, Sequence[float | None], str]] = [
            ("kernels", [self.kernels, self.eager_kernels], ",.0f"),
            ("HBM bytes", [self.hbm_bytes, self.eager_hbm_bytes], ",.0f"),
            ("activation traffic, x", traffic, ".2f"),
            ("frozen weight bytes", [self.weight_bytes], ",.0f"),
            ("peak bytes planned", [self.peak_bytes_planned], ",.0f"),
            ("peak bytes measured", [self.peak_bytes_measured], ",.0f"),
            ("median us a call", medians, ",.1f"),
            ("its 10th percentile", times("p10"), ",.1f"),
            ("its 90th percentile", times("p90"), ",.1f"),
            ("time over tvmcap's", ratios, ".2f"),
        ]
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items()) or "static"
        lines = [f"{sizes:22}{'tvmcap':>15}{'eager':>15}{'torch.compile':>15}"]
        for name, values, form in rows:
            cells = ("-" if v is None else format(v, form) for v in values)
            lines.append(f"{name:22}" + "".join(f"{cell:>15}" for cell in cells))
        state = {True: "verified", False: "NOT verified", None: "not verified yet"}[self.verified]
        return "\n".join([*lines, f"{self.tuned_tasks} of {self.tasks} tasks tuned; {state}"])

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
