"""Stand-ins for what ``build`` returns, with a library that is any Python function."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tvmcap.base.config import Config
from tvmcap.base.signature import DimSpec, Signature, TensorSpec


def signature(inputs, outputs, dims=()):
    """Build a signature of flat tuples from {name: (dtype, shape)} and a list of (dtype, shape)."""
    leaves = [{"kind": "leaf", "index": i} for i in range(len(inputs))]
    outs = [{"kind": "leaf", "index": i} for i in range(len(outputs))]
    return Signature(
        tuple(TensorSpec(n, d, tuple(s)) for n, (d, s) in inputs.items()),
        tuple(TensorSpec(f"out{i}", d, tuple(s)) for i, (d, s) in enumerate(outputs)),
        tuple(DimSpec(*d) for d in dims),
        {"kind": "tuple", "items": leaves},
        outs[0] if len(outs) == 1 else {"kind": "tuple", "items": outs},
        tuple(inputs),
    )


class FakeCompiled:
    """A library whose code is ``ours``; ``eager`` and ``args`` are what was captured."""

    def __init__(self, ours, eager, args, sig, executor=True, loaded=False):
        self.ours, self.signature, self.config = ours, sig, Config()
        self.executor = executor or None
        self.manifest = SimpleNamespace(target={"kind": "llvm"}, quantization=None, training=None)
        call = SimpleNamespace(
            signature=sig, eager=eager, args=args, kwargs={}, frozen=(), mod=None, lines={}
        )
        self.captured = None if loaded else call

    def __call__(self, *args):
        return self.ours(*args)


def block(x, w, b):
    """The capstone block, tanh form."""
    return torch.nn.functional.gelu(x @ w + b, approximate="tanh")


def block_case(m=8, k=64, n=48, dtype=torch.float32):
    """Return (args, signature) of the block with a symbolic batch."""
    gen = torch.Generator().manual_seed(m)
    args = (
        torch.randn(m, k, generator=gen).to(dtype),
        (torch.randn(k, n, generator=gen) / k**0.5).to(dtype),
        torch.randn(n, generator=gen).to(dtype),
    )
    d = str(dtype).removeprefix("torch.")
    sig = signature(
        {"x": (d, ("B", k)), "w": (d, (k, n)), "b": (d, (n,))}, [(d, ("B", n))], [("B", 1, 512)]
    )
    return args, sig
