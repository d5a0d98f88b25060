# %% [markdown]
# # Tune a block and read the log
#
# A kernel has settings (how large its tiles are, in which order it walks them) that change its
# speed and not its result. The best ones depend on the machine and on the sizes. *Tuning* measures
# some candidates and keeps every measurement as a *record*; `build` then uses the best record.
#
# Run it top to bottom: `python tutorials/02_tune_and_read_a_log.py`. It takes about half a minute,
# of which tuning has ten seconds. Serious tuning has minutes and a machine with nothing else to do.

# %%
import json
import logging
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from torch.nn import functional as F

import tvmcap

logging.basicConfig(format="%(message)s")
logger = logging.getLogger("tvmcap")
torch.manual_seed(0)
logs = Path(tempfile.mkdtemp(prefix="tvmcap-tutorial-"))


def block(x, w, b):
    return F.gelu(x @ w + b, approximate="tanh")


example = torch.randn(16, 256), torch.randn(256, 512) / 16, torch.randn(512)
options = {"target": "llvm", "dynamic": {"x": {0: "B"}}, "constants": ("w", "b")}

# %% [markdown]
# ## 1. Tune
#
# `trials` is the number of candidates to measure, `budget_s` the seconds it may take; whichever
# ends first ends the run, and Ctrl-C ends it too. What was measured until then is kept.
#
# Records go to `log_dir`. Without it they go to your own data folder, where every later build finds
# them. The batch is dynamic, so tuning chooses a few representative sizes and tunes each in turn.
# A terminal shows progress as a bar; anything else gets it as log lines of level INFO.

# %%
logger.setLevel(logging.INFO)
run = tvmcap.tune(block, example, trials=16, budget_s=10, log_dir=str(logs), **options)
logger.setLevel(logging.WARNING)
print(run)
assert 0 < run.trials <= 16 and not run.interrupted

# %% [markdown]
# Each row is one kernel at one size. `before` is the template's default (or the best record there
# was), `after` the best now; a dash marks a size for which the time did not suffice.
# `failures` counts candidates that did not compile, did not run, or gave a wrong result: a time
# counts only after the result was compared with a reference.
#
# ## 2. The log
#
# One JSON object a line. A line stands alone: what was computed, on which machine, by which
# version, with which settings (`knobs`), and how long a call took.

# %%
lines = [json.loads(line) for line in Path(run.log).read_text().splitlines()]
assert lines, "at least the default of one size was measured"
first = lines[0]
for name in ("workload", "sizes", "template", "knobs", "median_us", "p10_us", "p90_us", "error"):
    print(f"{name:10} {first[name]}")
print(f"{'target':10} {first['target']}")
print(f"{'tvm':10} {first['tvm']}, measured {first['date']}")

# %% [markdown]
# * `workload` says what is computed, without the dynamic size; `sizes` gives that.
# * `knobs` are the settings; where they are `None`, `trace` holds MetaSchedule's steps instead.
# * `error` is `None`, or the cause and the message of a failure. Failures are kept: they teach the
#   cost model what not to try.
# * Records of another machine, another TVM or an older template are kept and not used.
#
# What did the settings do? The spread between the best and the worst candidate of one size is what
# tuning has to gain.

# %%
by_size = defaultdict(list)
for line in lines:
    if line["error"] is None:
        by_size[line["sizes"]["rows"]].append((line["median_us"], line["knobs"]))
for size, measured in sorted(by_size.items()):
    measured.sort(key=lambda pair: pair[0])
    (best, knobs), (worst, _) = measured[0], measured[-1]
    print(
        f"rows={size:<4} {len(measured):2} candidates, {best:8.1f} to {worst:8.1f} us; best {knobs}"
    )
assert by_size

# %% [markdown]
# From a shell, `tvmcap report FOLDER` prints the same summary.
#
# ## 3. Build with the records
#
# `tune="cached"` is the default: use records where there are any. `explain` says which record
# serves which sizes. Neighbouring sizes share a kernel, so that there are at most eight, and the
# library itself chooses among them by the batch of each call.

# %%
lib = tvmcap.build(block, example, log_dir=str(logs), **options)
print(lib.explain())
[task] = lib.manifest.coverage
assert task["tuned"] and set(task["records"]) <= {f"rows={size}" for size in by_size}
assert list(task["ranges"])[-1] == "any", "some kernel serves every size above"

for batch in (1, 5, 128, 600):
    rows = torch.randn(batch, 256)
    assert torch.allclose(lib(rows), block(rows, *example[1:]), atol=1e-5)

# %% [markdown]
# ## 4. Resume
#
# Tune again, with the same folder: it goes on from what is there, and measures no candidate twice.
# `build(..., tune=64)` is the short form that tunes and builds in one call.

# %%
again = tvmcap.tune(block, example, trials=4, budget_s=4, log_dir=str(logs), **options)
print(again)
after = [json.loads(line) for line in Path(again.log).read_text().splitlines()]
assert after[: len(lines)] == lines, "a log only grows"

# %% [markdown]
# ## 5. A damaged log
#
# A line that is no record is counted, with a warning, and left where it is. The others still serve.

# %%
with open(run.log, "a") as file:
    file.write("this is not a record\n")
lib = tvmcap.build(block, example, log_dir=str(logs), verify=False, **options)
assert lib.manifest.coverage[0]["tuned"]

# %%
for path in logs.iterdir():
    path.unlink()
logs.rmdir()
