# %% [markdown]
# # Train a small language model under torch.compile
#
# `torch.compile(model, backend="tvmcap")` compiles the forward and backward graphs of a model and
# leaves the rest of training as it is: the loop, the optimizer, the data. Here a small transformer
# learns to write like this project's licence, and its loss follows eager PyTorch's step by step.
# Run it top to bottom: `python tutorials/07_train.py`.
#
# It runs on the CPU in under a minute, most of which is compiling.

# %%
import copy
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tvmcap

torch.manual_seed(0)
STEPS, CONTEXT, BATCH, WIDTH = 200, 32, 16, 32

# %% [markdown]
# ## 1. Text as numbers
#
# A character is a number. An example is `CONTEXT` characters, and what is to be learned is, at each
# of them, the next one.

# %%
text = (Path(__file__).parent.parent / "LICENSE").read_text()
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])


def batch(generator, rows=BATCH):
    starts = torch.randint(len(data) - CONTEXT - 1, (rows,), generator=generator)
    rows = torch.stack([data[s : s + CONTEXT + 1] for s in starts])
    return rows[:, :-1], rows[:, 1:]


# %% [markdown]
# ## 2. A model
#
# One transformer block: causal attention and an MLP, each after a normalisation, with dropout.


# %%
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.letter, self.place = nn.Embedding(len(letters), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        mlp = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), *mlp)
        self.head = nn.Linear(WIDTH, len(letters))

    def forward(self, x):
        rows, steps = x.shape
        y = self.letter(x) + self.place.weight[:steps]
        qkv = self.qkv(self.norm(y)).view(rows, steps, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv, is_causal=True)
        y = y + self.out(seen.transpose(1, 2).reshape(rows, steps, WIDTH))
        return self.head(y + self.mlp(y))


# %% [markdown]
# ## 3. Two runs, one compiled
#
# Both start from the same weights, see the same examples, and draw the same dropout: random numbers
# come from PyTorch's generator in either case.


# %%
def train(model, forward):
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, start = [], time.perf_counter()
    for step in range(STEPS):
        x, y = batch(generator)
        loss = F.cross_entropy(forward(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 0:
            start = time.perf_counter()  # the first step compiles
    return losses, 1e3 * (time.perf_counter() - start) / (STEPS - 1)


eager, model = Model(), Model()
model.load_state_dict(copy.deepcopy(eager.state_dict()))
fast = torch.compile(model, backend="tvmcap", options={"tune": "none"})

ours, ours_ms = train(model, fast)
theirs, theirs_ms = train(eager, eager)
for step in range(0, STEPS, 40):
    print(f"step {step:4}: compiled {ours[step]:.4f}, eager {theirs[step]:.4f}")
print(f"{ours_ms:.1f} ms a step compiled, {theirs_ms:.1f} ms eager")

# %% [markdown]
# The first steps agree to the rounding of float32. Training amplifies rounding, so later losses
# may part in their last digits; the curve is the same. It is not faster: a model this small,
# untuned, on a CPU, is no case for a compiler.

# %%
assert max(abs(a - b) for a, b in zip(ours[:20], theirs[:20], strict=True)) < 1e-3
last_ours, last_theirs = sum(ours[-20:]) / 20, sum(theirs[-20:]) / 20
assert last_ours < 0.8 * ours[0] and abs(last_ours - last_theirs) < 0.1 * last_theirs

# %% [markdown]
# ## 4. What to know
#
# - Weights are never frozen: an optimizer step is seen by the next call.
# - Another batch size compiles once more, with that size symbolic; then every size runs.
# - `options` are the fields of `tvmcap.Config`. `memory_budget` below 1 saves less for the backward
#   graph and computes more again. `mode="max-autotune"` tunes each graph before it runs.

# %%
x, _ = batch(torch.Generator().manual_seed(3), rows=3)
model.eval(), eager.eval()
eager.load_state_dict(model.state_dict())
with torch.no_grad():
    assert torch.allclose(torch.compile(model, backend="tvmcap")(x), eager(x), atol=1e-4)

# %% [markdown]
# ## 5. Where a graph breaks
#
# Dynamo splits a function where it cannot go on, for example at a branch on a value. The parts are
# compiled one by one; `explain_capture` lists the places, with what to do about each.


# %%
def clipped(x):
    if x.abs().max() > 1:
        x = x / x.abs().max()
    return x.tanh()


report = tvmcap.explain_capture(clipped, (torch.randn(8),))
print(report)
assert len(report.breaks) == 1 and "torch.where" in report.breaks[0].advice
