# %% [markdown]
# # Build a block and export it
#
# You have a PyTorch function whose speed matters. Here you turn it into a library: one file of
# machine code, checked against PyTorch, that runs at any batch size and needs neither PyTorch nor
# Python to be shipped. Run it top to bottom: `python tutorials/01_build_and_export.py`.
#
# It runs on the CPU (`target="llvm"`) in about half a minute. With `target="cuda"` the same code
# builds for an NVIDIA GPU.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

import tvmcap

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp(prefix="tvmcap-tutorial-"))

# %% [markdown]
# ## 1. A function and example inputs
#
# The block of this project: a linear layer with its activation. PyTorch runs it as three kernels
# (matmul, add, GELU); the two in between are written to memory and read again.


# %%
def block(x, w, b):
    return F.gelu(x @ w + b, approximate="tanh")


x = torch.randn(16, 256)
w = torch.randn(256, 512) / 16
b = torch.randn(512)

# %% [markdown]
# ## 2. Build
#
# * `dynamic={"x": {0: "B"}}`: dimension 0 of `x` may have any size. 16 is only the example.
# * `constants=("w", "b")`: these two are weights. They are packed for the kernel and stored inside
#   the library, and a call does not pass them.
# * `tune="none"`: rules alone choose the kernels. The next tutorial tunes.
#
# `build` also verifies: it compares the library with a float64 reference at several batch sizes,
# and raises `VerifyError` where an error is larger than twice that of PyTorch itself.

# %%
lib = tvmcap.build(
    block,
    (x, w, b),
    target="llvm",
    dynamic={"x": {0: "B"}},
    constants=("w", "b"),
    tune="none",
)
print(lib.explain())
assert lib.manifest.verified

# %% [markdown]
# ## 3. Call it
#
# Torch tensors in, a torch tensor out. (NumPy arrays in, a NumPy array out.) One library serves
# every batch size, with no compilation after the build.

# %%
for batch in (1, 7, 16, 300):
    rows = torch.randn(batch, 256)
    assert torch.allclose(lib(rows), block(rows, w, b), atol=1e-5)
print("the same as PyTorch at batch sizes 1, 7, 16 and 300")

# %% [markdown]
# What does not fit is an error that says what was expected, and it comes before any kernel runs.

# %%
try:
    lib(torch.randn(16, 255))
except tvmcap.errors.InputError as error:
    print("InputError:", error)
else:
    raise AssertionError("a wrong shape must be refused")

# %% [markdown]
# ## 4. What was gained
#
# `scoreboard` counts kernels and bytes, and times the library in turns with PyTorch and with
# torch.compile. Times depend on your machine; counts do not. *Activation traffic* is the bytes of
# activations that kernels read and write, over the bytes of the result.

# %%
score = lib.scoreboard({"B": 128})
print(score)
assert score.kernels == 1 and score.eager_kernels == 3
assert score.activation_traffic < score.eager_activation_traffic

# %% [markdown]
# Which link of the chain did that? Leave one out and look. Without the fuse pass every operator is
# a kernel again, and the traffic is back. (`baselines=False` times the library alone.)

# %%
unfused = tvmcap.build(
    block,
    (x, w, b),
    target="llvm",
    dynamic={"x": {0: "B"}},
    constants=("w", "b"),
    tune="none",
    disable=("fuse",),
)
apart = unfused.scoreboard({"B": 128}, baselines=False)
print(f"unfused: {apart.kernels} kernels, traffic {apart.activation_traffic:.1f}x")
print(f"fused:   {score.kernels} kernel,  traffic {score.activation_traffic:.1f}x")
assert apart.kernels > score.kernels
assert apart.activation_traffic > score.activation_traffic

# %% [markdown]
# ## 5. Export, and run it elsewhere
#
# `export` writes one file: code, weights and a manifest that says what it was built from and for.
# `load` needs TVM's runtime only. Below, another Python process loads it; PyTorch is hidden from
# that process, so NumPy carries the data.

# %%
path = lib.export(folder / "block.so")
print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")

elsewhere = f"""
import sys
sys.modules["torch"] = None  # as if it were not installed
import numpy as np
import tvmcap
lib = tvmcap.load({str(path)!r})
y = lib(np.ones((3, 256), dtype="float32"))
print(type(y).__name__, y.shape, float(y.sum()))
"""
done = subprocess.run([sys.executable, "-c", elsewhere], capture_output=True, text=True, check=True)
print(done.stdout.strip())
kind, rows, columns, total = done.stdout.replace("(", "").replace(")", "").split()
assert (kind, rows, columns) == ("ndarray", "3,", "512")
assert abs(float(total) - block(torch.ones(3, 256), w, b).sum().item()) < 0.1

# %% [markdown]
# ## 6. Modules
#
# The parameters of an `nn.Module` are constants without being named. Put the module in eval mode
# first. A parameter that you change later in PyTorch is not seen by the library: build again.

# %%
net = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
module = tvmcap.build(net.eval(), (x,), target="llvm", dynamic={0: {0: "B"}}, tune="none")
with torch.no_grad():
    assert torch.allclose(module(x), net(x), atol=1e-5)
print(f"{module.manifest.kernels_per_call} kernels for {len(net)} layers")
assert module.manifest.kernels_per_call == 2

# %% [markdown]
# ## Where to go next
#
# * `tutorials/02_tune_and_read_a_log.py` makes kernels faster by measuring.
# * `docs/cli.md`: the same from a shell.
# * `docs/deploying.md`: what a machine needs to run the file, and building for a GPU without one.

# %%
path.unlink()
folder.rmdir()
