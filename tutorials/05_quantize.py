# %% [markdown]
# # Quantize a model and see what it costs
#
# Weights in 8 bits are a quarter of the bytes of float32, and products of 8-bit integers are faster
# where the hardware has them. The price is accuracy. Here you pay it with open eyes: every build
# measures what each layer lost, and fails where that is more than you allow. Run it top to bottom:
# `python tutorials/05_quantize.py`.
#
# It runs on the CPU in about half a minute. `docs/quantization.md` lists every option.

# %%
import tempfile
from pathlib import Path

import torch
from torch import nn

import tvmcap

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp(prefix="tvmcap-tutorial-"))

# %% [markdown]
# ## 1. A model, and inputs like those it will see
#
# Two layers. Six channels of the inputs are 40 times larger than the others: transformers have such
# *outlier channels*, and they are what makes 8 bits hard.


# %%
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(1024, 512)
        self.head = nn.Linear(512, 64)

    def forward(self, x):
        return self.head(nn.functional.gelu(self.up(x), approximate="tanh"))


def batch(rows=64):
    x = torch.randn(rows, 1024)
    x[:, ::180] *= 40
    return x


model = Block().eval()
x, batches = batch(), [batch() for _ in range(4)]


def build(**options):
    common = {"target": "llvm", "dynamic": {0: {0: "B"}}, "tune": "none", "verify": False}
    return tvmcap.build(model, (x,), **{**common, **options})


def sqnr_db(lib):
    fresh = batch(200)
    with torch.no_grad():
        want = model(fresh)
    return float(10 * torch.log10(want.square().sum() / (want - lib(fresh)).square().sum()))


# %% [markdown]
# ## 2. One word
#
# `quantize="int8"` makes each product with a constant weight an 8-bit product: weights with one
# scale for each output channel, activations with one scale for each row, found at run time. Nothing
# else is needed; accuracy is measured on the example.
#
# *SQNR* is the signal over the noise that quantization added, in decibels: at 20 dB the noise is a
# tenth of the signal, at 40 dB a hundredth. The table has the worst layer first; *alone dB* is the
# noise that a layer adds by itself, and tells where to look. Good int8 keeps 35 to 45 dB: the
# outliers hurt `up`.

# %%
naive = build(quantize="int8")
print(naive.inspect("accuracy"))
cost = naive.accuracy
print(f"{cost.outputs[0].sqnr_db:.1f} dB in the report, on fresh inputs {sqnr_db(naive):.1f} dB")
assert cost.ok and abs(cost.outputs[0].sqnr_db - sqnr_db(naive)) < 2

# %% [markdown]
# ## 3. What was gained
#
# Bytes: the library holds 8-bit weights and one scale a column. The scoreboard counts them, beside
# the traffic of activations; with `baselines=True` it also times the library against PyTorch.

# %%
score = naive.scoreboard({"B": 64}, baselines=False)
print(score)
share = score.weight_bytes / cost.constants_before
print(f"weights: {share:.3f} of what they were; library: {cost.library_after / 1024:.0f} KiB")
assert share <= 0.27 and cost.library_after < 0.5 * cost.library_before

# %% [markdown]
# ## 4. Outlier channels: calibrate and smooth
#
# One scale a row has to reach the largest channel, and leaves few of the 256 steps to the others.
# SmoothQuant moves the outliers into the weights: channel by channel, activations are divided and
# weights multiplied by the same number, and the product stays what it was. To find the numbers it
# has to see activations: `calibration` is any iterable of inputs. The last quarter of them is held
# out, and the report is measured on those.

# %%
smooth = build(quantize={"smooth": 0.5}, calibration=batches)
print(smooth.inspect("accuracy"))
print(f"on fresh inputs {sqnr_db(smooth):.1f} dB, without smoothing {sqnr_db(naive):.1f} dB")
assert sqnr_db(smooth) >= sqnr_db(naive) + 5

# %% [markdown]
# ## 5. Static scales, and the same library again
#
# `activations="static"` uses one scale a tensor, from calibration. No kernel looks for the largest
# value of a row, and quantization joins the kernel that makes the activation. What is outside the
# range is clipped: the column *saturated* says how often. (`method` chooses the range: by default
# the largest value seen. Others clip more, which is wrong here, where outliers carry the signal.)
#
# What calibration found is a small JSON file. A build with it needs no inputs, and gives the same
# library.

# %%
static = {"activations": "static", "smooth": 0.5}
lib = build(quantize=static, calibration=batches)
ranges = lib.ranges.save(folder / "ranges.json")
again = build(quantize=static, calibration=ranges)
print(lib.inspect("accuracy"))
print(f"{lib.manifest.kernels_per_call} kernels, {naive.manifest.kernels_per_call} before")
assert torch.equal(lib(x), again(x))
assert lib.manifest.kernels_per_call < naive.manifest.kernels_per_call

# %% [markdown]
# ## 6. A budget
#
# `budget_db` is the least SQNR of every output, 20 dB if you do not say. A build that misses it
# fails, and the error is the report: no library with an accuracy that nobody looked at. What to do:
# smooth, as above; keep the layer that adds most noise as it is, `"keep": ("up",)` (names and
# patterns); or let `"auto": True` find the layers to keep.

# %%
try:
    build(quantize={"budget_db": 35})
except tvmcap.errors.AccuracyError as error:
    print("AccuracyError:", error)
    assert error.report.layers[-1].name == "up.weight" and not error.report.ok
else:
    raise AssertionError("the budget must be missed")

# %% [markdown]
# ## 7. Take the report with you
#
# One HTML page that needs no other file, or JSON for a script. The library carries the report, too:
# `tvmcap.load(path).accuracy`. From a shell:
#
# ```
# tvmcap build model.py:Block --input "x:f32[B=64,1024]" --quantize int8 \
#        --accuracy page.html -o block.so
# tvmcap inspect block.so --show accuracy
# ```

# %%
page = smooth.write_accuracy(folder / "accuracy.html")
data = smooth.write_accuracy(folder / "accuracy.json")
print(f"{page.name}: {page.stat().st_size} bytes; {data.name}: {data.stat().st_size} bytes")
exported = smooth.export(folder / "block.so")
assert tvmcap.load(exported).accuracy == smooth.accuracy

# %% [markdown]
# ## Where to go next
#
# * `docs/quantization.md`: every scheme and option, what runs, and what does not yet.
# * `tvmcap.verify(lib)` holds a quantized library to its budget on more inputs and sizes.
# * `tutorials/02_tune_and_read_a_log.py`: 8-bit products are tuned like all others.

# %%
for path in (page, data, ranges, exported):
    path.unlink()
folder.rmdir()
