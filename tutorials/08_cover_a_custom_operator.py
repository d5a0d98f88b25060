# %% [markdown]
# # Cover an operator of your own
#
# A model may call an operator that you registered with `torch.library`. The compiler does not know
# what it computes. `tvmcap.register_op` tells it: with a lowering, or with a call of PyTorch's
# kernel. Run it top to bottom: `python tutorials/08_cover_a_custom_operator.py`.
#
# It runs on the CPU in under half a minute.

# %%
import logging
import shutil
import tempfile
from pathlib import Path

import torch
from tvm import relax, te

import tvmcap

torch.manual_seed(0)
logging.basicConfig(level=logging.WARNING)
folder = Path(tempfile.mkdtemp(prefix="tvmcap-tutorial-"))
options = {"target": "llvm", "tune": "none", "dynamic": {"x": {0: "B"}}}

# %% [markdown]
# ## 1. An operator and its gradient
#
# `squareplus(x) = (x + sqrt(x**2 + b)) / 2`, a smooth relu. PyTorch needs three things of it: the
# kernel, the shape of the result (`register_fake`), and the gradient.


# %%
@torch.library.custom_op("tutorial::squareplus", mutates_args=())
def squareplus(x: torch.Tensor, b: float) -> torch.Tensor:
    return (x + torch.sqrt(x * x + b)) / 2


@squareplus.register_fake
def _(x, b):
    return torch.empty_like(x)


def backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    return gradient * (1 + x * torch.rsqrt(x * x + ctx.b)) / 2, None


def save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.b = inputs[1]


squareplus.register_autograd(backward, setup_context=save)


def model(x, w):
    return squareplus(x @ w, 4.0).sum(-1)


x, w = torch.randn(5, 8), torch.randn(8, 16)

# %% [markdown]
# ## 2. Without a lowering
#
# `build` refuses the operator, with the line. Under `torch.compile` only that part of the graph
# stays with PyTorch, and one warning names it.

# %%
try:
    tvmcap.build(model, (x, w), **options)
    raise AssertionError("refused")
except tvmcap.errors.UnsupportedOperatorError as e:
    print(e)

fast = torch.compile(model, backend="tvmcap", options={"tune": "none"})
assert torch.allclose(fast(x, w), model(x, w), atol=1e-4)

# %% [markdown]
# ## 3. A lowering
#
# A function of the operator's arguments. It takes Relax values and returns one; numbers come as
# Python's. The operator then fuses with its neighbours, and the library runs anywhere.


# %%
def lowering(x, b):
    root = relax.op.sqrt(relax.op.add(relax.op.multiply(x, x), relax.const(b, "float32")))
    return relax.op.multiply(relax.op.add(x, root), relax.const(0.5, "float32"))


tvmcap.register_op("tutorial::squareplus", lower=lowering)
lib = tvmcap.build(model, (x, w), **options)
x7 = torch.randn(7, 8)
assert lib.manifest.verified and lib.manifest.needs == ()
assert torch.allclose(lib(x7, w), model(x7, w), atol=1e-4)

# %% [markdown]
# The same as a function of TE tensors, which is what TOPI's functions are:


# %%
def elementwise(x, b):
    return te.compute(x.shape, lambda *i: (x[i] + te.sqrt(x[i] * x[i] + b)) / 2)


tvmcap.register_op("tutorial::squareplus", lower=elementwise)
assert torch.allclose(tvmcap.build(model, (x, w), **options)(x7, w), model(x7, w), atol=1e-4)

# %% [markdown]
# ## 4. Gradients
#
# AOTAutograd differentiates with the formula above, and the forward graph keeps the operator whole.

# %%
torch._dynamo.reset()
fast = torch.compile(model, backend="tvmcap", options={"tune": "none"})
leaf = x.clone().requires_grad_()
(ours,) = torch.autograd.grad(fast(leaf, w).sum(), leaf)
(eager,) = torch.autograd.grad(model(leaf, w).sum(), leaf)
assert torch.allclose(ours, eager, atol=1e-4)

# %% [markdown]
# ## 5. PyTorch's kernel
#
# `lower="eager"` calls the operator as it is, where a lowering is not worth its work. Nothing fuses
# with it, and the library no longer runs without PyTorch and the operator: the manifest, and a
# warning at export, say so.

# %%
tvmcap.register_op("tutorial::squareplus", lower="eager")
lib = tvmcap.build(model, (x, w), **options)
assert torch.allclose(lib(x7, w), model(x7, w), atol=1e-4)
assert lib.manifest.needs == ("operator:tutorial::squareplus", "torch")
lib.export(folder / "model.so")
print(lib.inspect("manifest"))

# %%
shutil.rmtree(folder)
