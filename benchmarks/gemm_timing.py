"""Check and time calls of the block on a GPU, as CUDA graphs over rotated inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

#: Past twice the L2 of an H200 (60 MB), so that no call finds its inputs there.
ROTATED_BYTES = 160 << 20
#: Largest error of an element over its own size plus the output's root mean square. bf16 rounds
#: within 2**-9; a missing term of the sum is far more.
TOLERANCE = 1e-2
_GRAPH_US, _WARM_S = 300.0, 0.005

Call = Callable[[dict[str, torch.Tensor]], Any]


class Inputs:
    """Copies of one random problem that successive calls rotate through, and its reference.

    Parameters
    ----------
    first: tensors by name; "out" is what a call writes, and the rest what it reads.
    reference: what "out" should hold, in float32.
    flops: operations of one call.
    """

    def __init__(
        self,
        first: dict[str, torch.Tensor],
        reference: torch.Tensor,
        read: Sequence[str],
        flops: int,
    ) -> None:
        self.reference, self.flops, self.limit = reference, flops, TOLERANCE
        self.read_bytes = sum(first[name].nbytes for name in read)
        self.nbytes = self.read_bytes + first["out"].nbytes
        count = max(1, min(64, math.ceil(ROTATED_BYTES / self.nbytes)))
        self.sets = [first]
        self.sets += [{name: t.clone() for name, t in first.items()} for _ in range(count - 1)]
        self.scale = self.reference.square().mean().sqrt()

    @property
    def calls(self) -> int:
        """Calls of one graph: whole turns through the sets, some hundred microseconds."""
        guess = 1e6 * max(self.flops / 700e12, self.nbytes / 4e12) + 2
        wanted = max(4, min(64, math.ceil(_GRAPH_US / guess)))
        return math.ceil(wanted / len(self.sets)) * len(self.sets)

    def poison(self) -> None:
        """Fill every output with NaN, so that what is not written shows."""
        for one in self.sets:
            one["out"].fill_(math.nan)

    def require(self, got: torch.Tensor, name: str) -> float:
        """Return the error of an output; raises AssertionError where it is beyond the limit."""
        error = self.error(got)
        if not error <= self.limit:
            raise AssertionError(f"{name} is wrong: relative error {error:.3g}")
        return error

    def error(self, got: torch.Tensor) -> float:
        """Return the largest relative error of an output; infinite where a NaN is."""
        difference = (got.float() - self.reference).abs() / (self.reference.abs() + self.scale)
        worst = difference.max().item()
        return math.inf if math.isnan(worst) else worst


def draw(seed: int, device: str) -> Callable[..., torch.Tensor]:
    """Return ``f(*shape, scale=1.0)``, which draws normal bf16 values on the device."""
    make = torch.Generator(device=device).manual_seed(seed)

    def values(*shape: int, scale: float = 1.0) -> torch.Tensor:
        normal = torch.randn(shape, generator=make, device=device, dtype=torch.float32)
        return (normal * scale).bfloat16()

    return values


def gemm_inputs(m: int, k: int, n: int, seed: int, device: str = "cuda") -> Inputs:
    """Draw x, b and w, the latter stored [N, K] ("nk") and [K, N] ("kn"), and the block of them."""
    torch.backends.cuda.matmul.allow_tf32 = False
    new = draw(seed, device)
    first = {"x": new(m, k), "b": new(n), "nk": new(n, k, scale=k**-0.5)}
    first["kn"] = first["nk"].t().contiguous()
    first["out"] = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    product = first["x"].float() @ first["nk"].float().t()
    reference = F.gelu(product + first["b"].float(), approximate="tanh")
    return Inputs(first, reference, ("x", "nk", "b"), 2 * m * k * n)


class Graph:
    """Calls captured in a CUDA graph on a stream of its own."""

    def __init__(self, call: Call, inputs: Inputs, stream: torch.cuda.Stream) -> None:
        self.stream, self.calls = stream, inputs.calls
        self.graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(inputs.sets[0])
            stream.synchronize()
            self.graph.capture_begin(capture_error_mode="relaxed")
            try:
                for i in range(self.calls):
                    call(inputs.sets[i % len(inputs.sets)])
            finally:
                self.graph.capture_end()

    def sample(self, count: int) -> list[float]:
        """Return ``count`` samples of microseconds a call; replays follow one another at once."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        with torch.cuda.stream(self.stream):
            self.graph.replay()  # keeps the GPU busy while the next ones are launched
            events[0].record()
            for event in events[1:]:
                self.graph.replay()
                event.record()
            events[-1].synchronize()
        return [1e3 * a.elapsed_time(b) / self.calls for a, b in itertools.pairwise(events)]

    def time(self, seconds: float, least: int = 5, most: int = 40) -> list[float]:
        """Take samples for about ``seconds``, after some milliseconds in which clocks rise."""
        once = self.sample(1)[0] * self.calls * 1e-6
        self.sample(math.ceil(_WARM_S / max(once, 1e-6)))
        return self.sample(int(max(least, min(most, seconds / max(once, 1e-6)))))


def linear_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute the block, w stored [N, K]."""
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def baselines() -> dict[str, Call]:
    """Return what PyTorch offers for the block: cuBLASLt's fused epilogue, and two kernels."""
    fused = torch._addmm_activation
    return {
        "cublaslt_epilogue_nk": lambda s: fused(s["b"], s["x"], s["nk"].t(), use_gelu=True),
        "cublaslt_epilogue_kn": lambda s: fused(s["b"], s["x"], s["kn"], use_gelu=True),
        "linear_gelu": lambda s: linear_gelu(s["x"], s["nk"], s["b"]),
    }


def interleaved(graphs: dict[str, Graph], turns: int, seconds: float) -> dict[str, list[float]]:
    """Time graphs in turns, forwards and backwards, for ``seconds`` a graph in all."""
    us: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(turns):
        for name in list(graphs)[:: 1 if turn % 2 == 0 else -1]:
            us[name] += graphs[name].time(seconds / turns, least=3, most=20)
    return us


def read_bandwidth(nbytes: int = 4 << 30, seconds: float = 0.1) -> dict[str, float]:
    """Return GB/s of a read-only pass (a sum) and of a copy (bytes read plus written)."""
    source = torch.ones(nbytes // 4, device="cuda", dtype=torch.float32)
    copy = torch.empty_like(source)
    found = {}
    for name, call, moved in (
        ("read", lambda: torch.sum(source), nbytes),
        ("copy", lambda: copy.copy_(source), 2 * nbytes),
    ):
        call()
        torch.cuda.synchronize()
        times = []
        for _ in range(max(5, int(seconds / (moved / 4e12)))):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e-3)
        found[name] = moved / sorted(times)[len(times) // 2] / 1e9
    return found
