# %% [markdown]
# # Write a schedule template
#
# tvmcap finds a schedule for each kernel: by a *template* that knows its kind of kernel, or by
# general rules. A template is a Python module that says which kernels it serves, what can be chosen
# about them, and how a choice becomes code. Here you read one, try each of its parts, hand it to
# `build` and `tune`, and then look at the one that serves matrix products on Hopper GPUs.
#
# Run it top to bottom: `python tutorials/03_write_a_schedule_template.py`. It takes half a minute
# and needs no GPU: the last part generates CUDA source and does not run it.

# %%
import inspect
import json
import re
import tempfile
from collections import Counter
from pathlib import Path

import row_sums
import torch
import tvm
from torch.nn import functional as F

import tvmcap
from tvmcap import pipeline
from tvmcap.base.codegen import make_target
from tvmcap.base.config import make_config
from tvmcap.capture.export import capture
from tvmcap.kernel.template import source_hash
from tvmcap.schedules.hopper_gemm import TEMPLATE as HOPPER

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp(prefix="tvmcap-tutorial-"))


def show(part):
    """Print the source of a part of the template."""
    print(inspect.getsource(part))


# %% [markdown]
# ## 1. The kernel to serve
#
# A weighted sum of squares over each row. tvmcap fuses its three operators into one kernel.


# %%
def energy(x, w):
    return (x * x * w).sum(-1)


example = torch.randn(16, 4096), torch.rand(4096)
options = {"target": "llvm", "dynamic": {"x": {0: "B"}}, "log_dir": str(folder)}

before = tvmcap.build(energy, example, tune="none", **options)
print(before.explain())
assert before.manifest.coverage[0]["served_by"] == "rule:cpu"

# %% [markdown]
# `rule:cpu` is the general rule for CPUs. It has no settings and serves all sizes alike.
#
# A template sees a kernel as a TVM function (`PrimFunc`) of loops over elements, before anything is
# scheduled. These are the passes of `build` up to that point:


# %%
def fused_kernel(function, args, **options):
    """Return the one kernel that a function is fused into, and the target it is for."""
    config = make_config(**options)
    target = make_target(config.target)
    captured = capture(function, args, None, config)
    passes = pipeline.front(target)
    module = pipeline.run(captured.mod, passes, target, config, pipeline.Trace())
    (kernel,) = (f for f in module.functions.values() if isinstance(f, tvm.tirx.PrimFunc))
    return kernel, target


kernel, target = fused_kernel(energy, example, **options)
print(kernel.script())

# %% [markdown]
# ## 2. match: which kernels, and what to know of them
#
# `row_sums.py` beside this tutorial is the template; keep it open. `match` reads a kernel and
# returns a *problem*, or None for a kernel that is not its business. It looks at structure, never
# at names: elementwise work, and last a float32 sum over columns. What is squared or weighted does
# not matter, because the schedule moves that work into the sum as it is.

# %%
show(row_sums.match)
problem = row_sums.match(kernel, target)
print(problem)
assert problem.columns == 4096 and not isinstance(problem.rows, int), "the rows are symbolic"

# %% [markdown]
# `problem.key()` names the workload in records. It leaves out the rows, so that one log serves all
# batch sizes.
#
# `refuse` puts into words why a kernel is not served that one would expect to be. `explain` shows
# it.


# %%
def norms(x):
    return (x * x).sum(-1).sqrt()


other, _ = fused_kernel(norms, example[:1], **options)
print("refused:", row_sums.refuse(other, target))
assert row_sums.match(other, target) is None and row_sums.refuse(other, target)
assert row_sums.refuse(kernel, target) is None

# %% [markdown]
# ## 3. Knobs and space: what can be chosen
#
# A sum is a chain of additions, each waiting for the one before. So a row is summed in several
# `lanes` that grow side by side, in vector registers, and are added up at the end. And rows may be
# shared by all cores, which pays only where there is enough work to be worth starting them.
#
# `space` lists every setting that can run. What cannot run, or would not be exact enough, is not in
# it: here, lanes that do not divide the columns, and so few that they would be long chains, whose
# rounding errors grow. `build` would not accept such sums.

# %%
show(row_sums.Knobs)
space = row_sums.space(problem, target)
print(len(space), "settings:", *space, sep="\n  ")
assert len(space) == 8
odd = row_sums.space(row_sums.Problem(problem.rows, 4096 + 32, 2), target)
assert {knobs.lanes for knobs in odd} == {32}, "16 do divide 4128, in sums of 258"

# %% [markdown]
# ## 4. lower: from a setting to code
#
# TVM's schedule transforms the loops step by step and keeps what they compute. `compute_inline`
# moves the elementwise work into the sum, `rfactor` splits the sum into lanes, `vectorize` puts
# them into registers, `parallel` gives rows to cores. (A template may also write a whole new
# kernel, as the GPU ones do; only the parameters must stay.)
#
# The attributes at the end tell the rest of tvmcap that the kernel is done, and that the rows are
# all dimensions of the result: `tvmcap.trailing` dimensions of it are not, 1 unless it is given.

# %%
show(row_sums.lower)
scheduled = row_sums.lower(kernel, problem, row_sums.Knobs(lanes=32, parallel=True), target)
print(scheduled.script())
assert "T.parallel" in scheduled.script() and "T.vectorized" in scheduled.script()

# %% [markdown]
# Try each setting by hand before you let a tuner loose on them. Every one must give the same sums.

# %%
x, w = torch.randn(7, 4096), torch.rand(4096)
expected = (x.double() * x.double() * w.double()).sum(-1)
for knobs in space:
    made = row_sums.lower(kernel, problem, knobs, target).with_attr("global_symbol", "main")
    call = tvm.compile(tvm.IRModule({"main": made}), target)["main"]
    out = tvm.runtime.tensor(torch.full((7,), torch.nan).numpy())
    call(tvm.runtime.tensor(x.numpy()), tvm.runtime.tensor(w.numpy()), out)
    assert torch.allclose(torch.from_numpy(out.numpy()).double(), expected, rtol=1e-5), knobs
print(f"all {len(space)} settings give the right sums")

# %% [markdown]
# ## 5. estimate, default, ranges: a good guess without a measurement
#
# `estimate` gives rough microseconds. They need not be right, only rank: the least is the `default`
# that serves where no record is, and tuning tries first what ranks high. `ranges` is the default
# where the number of rows is symbolic: (largest rows, setting), the last for any number.

# %%
show(row_sums.estimate)
ranges = row_sums.ranges(problem, target)
print(ranges)
assert ranges[-1][0] is None and all(knobs in space for _, knobs in ranges)
assert row_sums.default(problem, target) in space

# %% [markdown]
# `features` is the same knowledge as numbers for the cost model, which learns from measurements
# what the estimate has wrong: a row for each setting, a column for each name.

# %%
table = row_sums.features(problem, space, target)
print(row_sums.FEATURES, table[0])
assert table.shape == (len(space), len(row_sums.FEATURES))

# %% [markdown]
# ## 6. Register it
#
# `TEMPLATE` at the end of the module binds the parts together. After `register_template` this
# process asks it before the templates that ship with tvmcap. It must be a variable of a module of
# its own, because tuning compiles candidates in other processes: they import that module, and have
# no torch. For the command line, call `register_template` in the file of your program.

# %%
tvmcap.register_template(row_sums.TEMPLATE)
lib = tvmcap.build(energy, example, tune="none", **options)
print(lib.explain())
[task] = lib.manifest.coverage
assert task["served_by"] == "template:row_sums" and not task["tuned"]
assert len(task["ranges"]) == len(ranges)

# %% [markdown]
# The ranges became variants of the kernel, and the library chooses by the rows of each call. The
# kernel that `refuse` spoke of keeps the general rule, and `explain` says why.

# %%
plain = tvmcap.build(norms, example[:1], tune="none", **options)
print(plain.explain())
[task] = plain.manifest.coverage
assert task["served_by"] == "rule:cpu" and "no row_sums: it is not elementwise" in task["reason"]

# %% [markdown]
# ## 7. Tune it
#
# Tuning measures the defaults, then what the estimate and the cost model rank high. A setting that
# fails to compile, crashes or gives a wrong sum costs its own trial only.

# %%
run = tvmcap.tune(energy, example, trials=12, budget_s=12, **options)
print(run)
assert 0 < run.trials <= 12

lib = tvmcap.build(energy, example, **options)
print(lib.explain())
[task] = lib.manifest.coverage
assert task["served_by"] == "template:row_sums" and task["tuned"]

for batch in (1, 5, 64, 600):
    rows = torch.randn(batch, 4096)
    assert torch.allclose(lib(rows, w), energy(rows, w), rtol=1e-4)

# %% [markdown]
# A record holds the setting as JSON and a hash of the template's source. Change the template, and
# records of the old one are kept and not used: a setting may mean something else now. (Other
# modules that decide what a setting means are listed in `Template.modules`.)

# %%
lines = [json.loads(line) for line in Path(run.log).read_text().splitlines()]
for line in lines[:3]:
    print(line["template"], line["sizes"], line["knobs"], line["median_us"], line["error"])
assert all(line["error"] is None for line in lines), "every setting runs"
assert {line["template_hash"] for line in lines} == {source_hash(row_sums.TEMPLATE)}
for line in lines:
    text = json.dumps(line["knobs"])
    assert row_sums.TEMPLATE.knobs_from_json(text) in space, "a record leads back to its setting"

# %% [markdown]
# ## 8. The template of Hopper GPUs
#
# The same parts, for matrix products with whatever elementwise work follows, on an H100 or H200.
# Take the block of the first tutorial in bfloat16.


# %%
def block(x, w, b):
    return F.gelu(x @ w + b, approximate="tanh")


def gemm(rows, **more):
    """Return the kernel of the block with K=1024, N=4096, and what the template reads off it."""
    shapes = (rows, 1024), (1024, 4096), (4096,)
    inputs = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    func, gpu = fused_kernel(block, inputs, target="cuda:sm_90a", **more)
    return func, HOPPER.match(func, gpu), gpu


func, product, gpu = gemm(2048)
print("rows, n, k:", product.rows, product.n, product.k)
settings = HOPPER.space(product, gpu)
by_kind = Counter("swapped" if s.swapped else s.groups for s in settings)
print(f"{len(settings)} settings: {dict(by_kind)}")
assert set(by_kind) == {"rows", "columns", "tiles", "swapped"}

# %% [markdown]
# What its knobs mean is in the docstring; `docs/kernels.md` tells which gave what.

# %%
print(inspect.getdoc(HOPPER.knobs))

# %% [markdown]
# Its estimate counts cycles of the tensor cores, bytes through caches and memory, and waves of
# tiles over the multiprocessors. With few rows another kernel wins: *swapped*, which reads the
# weight once at the speed of memory. So one library has several variants.

# %%
times = HOPPER.estimate(product, settings, gpu)
for us, knobs in sorted(zip(times, settings, strict=True), key=lambda pair: pair[0])[:3]:
    print(f"about {us:5.1f} us  {HOPPER.knobs_to_json(knobs)}")
assert HOPPER.default(product, gpu) == settings[times.index(min(times))]

_, dynamic, _ = gemm(16, dynamic={"x": {0: "B"}})
for rows, knobs in HOPPER.ranges(dynamic, gpu):
    kind = "swapped" if knobs.swapped else f"shared by {knobs.groups}"
    print(f"up to {rows or 'any'} rows: {knobs.bm} x {knobs.bn}, {knobs.stages} stages, {kind}")
assert HOPPER.ranges(dynamic, gpu)[0][1].swapped
assert not HOPPER.ranges(dynamic, gpu)[-1][1].swapped

# %% [markdown]
# And this is what `lower` writes for 2048 rows, as CUDA source. TMA copies tiles to shared memory
# (`cp.async.bulk.tensor`), barriers say when they are there (`mbarrier`), and the tensor cores
# multiply straight from shared memory (`wgmma`).

# %%
knobs = HOPPER.default(product, gpu)
made = HOPPER.lower(func, product, knobs, gpu).with_attr("global_symbol", "block")
with gpu:
    compiled = tvm.compile(tvm.IRModule({"block": made}), target=gpu, tir_pipeline="tirx")
source = compiled.mod.imports[0].inspect_source()
wanted = r"(?:wgmma\.mma_async|cp\.async\.bulk\.tensor|mbarrier\.try_wait)[\w.:]*"
print(*sorted(set(re.findall(wanted, source))), sep="\n")
kernels = {line for line in source.splitlines() if "__global__" in line and ";" not in line}
assert len(kernels) == 1, "product, bias and GELU are one kernel"
assert "tanh" in source and "cp.async.bulk.tensor.2d.shared::cluster.global" in source
width = knobs.bn // 2 if knobs.groups == "columns" else knobs.bn
assert f"wgmma.mma_async.sync.aligned.m64n{width}k16" in source

# %% [markdown]
# What TMA cannot read is refused in words, as `row_sums` does:

# %%
inputs = [torch.zeros(s, dtype=torch.bfloat16) for s in ((64, 1001), (1001, 4096), (4096,))]
func, gpu = fused_kernel(block, inputs, target="cuda:sm_90a")
print("refused:", HOPPER.refuse(func, gpu))
assert HOPPER.match(func, gpu) is None and "16 bytes" in HOPPER.refuse(func, gpu)

# %% [markdown]
# ## Where to go next
#
# * `tvmcap/kernel/template.py`: all parts of a template, and which may be left out.
# * `schedules/row_norm.py`: a whole family (norms, softmax) in one template, for GPUs.
# * `docs/kernels.md`: what the GPU kernels do, and what was tried.
# * On a GPU machine: `tvmcap tune ... --target cuda`, and see what your template gains.

# %%
for path in folder.iterdir():
    path.unlink()
folder.rmdir()
