# %% [markdown]
# # The cost model
#
# A kernel has dozens to thousands of settings, and measuring one takes a tenth of a second or more.
# A *cost model* learns from the records of earlier measurements which settings are worth measuring,
# so that tuning starts with good ones, and picks a setting where nothing was measured at all.
#
# Run it top to bottom: `python tutorials/04_the_cost_model.py`. It takes under a minute and needs
# no GPU. It measures little, on a machine that may be busy: its figures show how things are done,
# and not how good they get. `docs/results.md` has figures of serious runs.

# %%
import dataclasses
import json
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import tvmcap
from tvmcap.base.codegen import make_target
from tvmcap.kernel import held_out, models, spaces, tasks
from tvmcap.kernel.features import template_features
from tvmcap.kernel.records import RecordStore
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.upkeep import merge, prune, status
from tvmcap.schedules.cpu_gemm import TEMPLATE
from tvmcap.view.page import write_report
from tvmcap.view.tuning import tuning_report, usual_target

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp(prefix="tvmcap-tutorial-"))
logs = folder / "logs"
target = make_target("llvm")
options = {"target": "llvm", "log_dir": str(logs), "cache_dir": str(folder / "cache")}


def layer(inputs, outputs):
    return torch.nn.Sequential(torch.nn.Linear(inputs, outputs), torch.nn.ReLU()).eval()


# %% [markdown]
# ## 1. Something to learn from
#
# Three small layers, ten measurements each. Every measurement becomes a record.

# %%
network = torch.nn.Sequential(layer(256, 512), layer(512, 128), layer(128, 384))
run = tvmcap.tune(network, (torch.randn(64, 256),), trials=30, **options)
print(run)
store = RecordStore(logs)
records = [r for r in store.records if r.template == TEMPLATE.name]
assert len(records) >= 30 == run.trials

# %% [markdown]
# ## 2. What the model sees
#
# Not the code: *features* of the problem, of the setting, and of what follows from both, such as
# how many tiles there are and how many bytes a block moves. A template names and computes them,
# for many settings at once.

# %%
first = records[0]
print(first.knobs)
for name, value in zip(TEMPLATE.feature_names, first.features, strict=True):
    print(f"{name:16} {value:10.3f}")
assert len(first.features) == len(TEMPLATE.feature_names)

# %% [markdown]
# ## 3. Learn, and rank
#
# Boosted trees (XGBoost) learn to put the candidates of one task in order. They never compare the
# times of different tasks: how long a kernel takes is not asked, only which setting makes it fast.
# So records of one problem teach something about another.

# %%
groups = models.groups(records, TEMPLATE, target)
model = models.train(records, TEMPLATE, target)
assert model.learnt and model.pretrained == sum(len(g.times_us) for g in groups)
print(f"{model.pretrained} measurements of {len(groups)} tasks taught {model.objective}")

# %% [markdown]
# Ranking is cheap, so that all settings that fit are ranked and none is missed. Here are those of a
# layer that was never measured.


# %%
def problem_of(module, x):
    """Return what the template reads off the fused kernel of a module."""
    from tvmcap import pipeline
    from tvmcap.base.config import make_config
    from tvmcap.capture.export import capture

    config = make_config(target="llvm")
    captured = capture(module, (x,), None, config)
    mod = pipeline.run(captured.mod, pipeline.front(target), target, config, pipeline.Trace())
    (task,) = (t for t in tasks.extract(mod, target, spaces.find) if t.template is TEMPLATE)
    return task.problem


unseen, x = layer(320, 192), torch.randn(64, 320)
problem = problem_of(unseen, x)
points = TEMPLATE.space(problem, target)
start = time.perf_counter()
scores = model.scores(template_features(TEMPLATE, problem, points, target))
spent = time.perf_counter() - start
print(f"{len(points)} settings ranked in {spent * 1e3:.1f} ms")
for i in np.argsort(-scores)[:3]:
    print(f"{scores[i]:.3f} {points[i]}")
assert scores.shape == (len(points),) and scores.min() > 0 and scores.max() < 1

# %% [markdown]
# ## 4. Is it any good?
#
# Only what it was not taught can tell. `judge` predicts each task by a model that learnt from the
# others. *Pairs in order*: of two settings whose times differ by more than measuring can tell, how
# often is the faster one put first (guessing gives 0.5)? None where no two differ that much. *Best
# over first pick*: the best time over that of the setting that was put first.

# %%
(judgement,) = held_out.judge(records, target)
print(f"pairs in order {judgement.pairwise}, best over first pick {judgement.best_of_1}")
for name, share in judgement.importance[:5]:
    print(f"{name:16} {share:.0%} of what the trees gained")
assert judgement.held_out == "workloads" and len(judgement.predictions) == len(groups)

# %% [markdown]
# Thirty measurements of short kernels on a busy machine can come out near chance. To see that
# it is the times and not the model, give the same candidates times that follow a rule: many
# accumulators are good, unrolling is not.


# %%
def by_rule(record):
    """Return a record with a time that two of its features decide."""
    seen = dict(zip(TEMPLATE.feature_names, record.features, strict=True))
    us = 1000 / seen["accumulators"] * (1 + 0.05 * seen["unroll"])
    return dataclasses.replace(record, median_us=us)


(ruled,) = held_out.judge([by_rule(record) for record in records], target)
print(f"pairs in order {ruled.pairwise:.2f}, best over first pick {ruled.best_of_1:.2f}")
assert ruled.pairwise > 0.7

# %% [markdown]
# `benchmarks/cost_model.py` judges with thousands of records, over several seeds, and with simpler
# orders beside it.

# %% [markdown]
# ## 5. A build that measures nothing
#
# A model in a file beside the records serves later builds and runs. It names its features and the
# hash of what it learnt from; one that takes other features than today's is refused. Where a size
# has a record, the record serves; where it has none, the model's choice; without a model, the
# template's default. `explain` says which it was.

# %%
path = models.save(model, logs, TEMPLATE.name, target)
about = json.loads(json.loads(path.read_text())["learner"]["attributes"]["tvmcap"])
print(path.name, about["objective"], about["measurements"], "measurements, data", about["data"])

lib = tvmcap.build(unseen, (x,), **options)
print(lib.explain())
assert "the cost model's choice" in lib.explain()
assert torch.allclose(torch.as_tensor(lib(x)), unseen(x), atol=1e-4)

# %% [markdown]
# A run of `tune` starts from the same model and refines it with what it measures.
#
# ## 6. The report
#
# `tvmcap report FOLDER -o report.html -o report.png` draws how tuning went: the best against
# measurements and seconds, predicted against measured, what the model goes by, failures by cause,
# and each task. The same from Python:

# %%
store.refresh()
stores = Stores((store,), store)
report = tuning_report(stores, usual_target(stores))
for name in ("report.html", "report.png"):
    write_report(report, folder / name)
    print(name, (folder / name).stat().st_size, "bytes")
page = (folder / "report.html").read_text()
assert page.count("<svg") >= 5 and not re.search(r'(src|href)="http', page)
seconds = "an unknown number of" if report.seconds is None else f"{report.seconds:.0f}"
print(f"{report.measurements} measurements in {seconds} seconds")

# %% [markdown]
# ## 7. Upkeep
#
# Stores grow and multiply. `tvmcap cache status` counts what each holds, `cache merge A B --into C`
# makes one of several, and `cache prune` drops what no longer serves: records of another TVM, of
# other source of their template, and those that are neither among the best of their task nor in a
# sample to learn from. `--dry-run` says it first, and says how many exist nowhere else.

# %%
again = merge([logs], folder / "all")
assert again.added == len(store.records) and merge([logs], folder / "all").added == 0
plan = prune(folder / "all", best=2, sample=4, dry_run=True, others=[logs])
print(f"would keep {plan.kept} and drop {dict(plan.dropped)}; last copies: {plan.last_copies}")
assert plan.last_copies == 0 and status(folder / "all").records == len(store.records)
done = prune(folder / "all", best=2, sample=4)
assert status(folder / "all").records == done.kept == plan.kept
assert RecordStore(logs).records == store.records, "the other store is as it was"

# %%
lib = None
for path in sorted(folder.rglob("*"), reverse=True):
    path.rmdir() if path.is_dir() else path.unlink()
folder.rmdir()
