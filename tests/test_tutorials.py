"""The tutorials run top to bottom; their own asserts check what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tvmcap import pipeline
from tvmcap.base.codegen import make_target
from tvmcap.base.config import make_config
from tvmcap.capture.export import capture

FOLDER = Path(__file__).parent.parent / "tutorials"
TUTORIALS = sorted(FOLDER.glob("[0-9]*.py"))


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(tutorial, tmp_path):
    places = {
        "XDG_CACHE_HOME": tmp_path / "cache",
        "XDG_DATA_HOME": tmp_path / "data",
        "TMPDIR": tmp_path,
    }
    # torch.compile precompiles its headers there; others of this machine did
    shared = Path(default_cache_dir())
    shared.mkdir(exist_ok=True)
    (tmp_path / shared.name).symlink_to(shared)
    environment = {**os.environ, **{name: str(path) for name, path in places.items()}}
    command = [sys.executable, str(tutorial)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert not list(tmp_path.glob("tvmcap-tutorial-*")), "a tutorial leaves nothing behind"


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_is_cells_of_prose_and_code(tutorial):
    first, *cells = re.split(r"^# %%", tutorial.read_text(), flags=re.MULTILINE)
    assert first == "" and len(cells) > 8
    prose = [cell for cell in cells if cell.startswith(" [markdown]\n")]
    assert len(prose) >= len(cells) / 3
    for cell in prose:
        body = cell.split("\n", 1)[1]
        assert all(line.startswith("#") or not line.strip() for line in body.splitlines())


def test_there_are_tutorials():
    names = [path.name for path in TUTORIALS]
    assert names[:2] == ["01_build_and_export.py", "02_tune_and_read_a_log.py"]
    assert names[2:] == [
        "03_write_a_schedule_template.py",
        "04_the_cost_model.py",
        "05_quantize.py",
        "06_deploy_and_serve.py",
        "07_train.py",
        "08_cover_a_custom_operator.py",
    ]


SUMS = {
    "energy": (lambda x, w: (x * x * w).sum(-1), 4096, 2),
    "one input": (lambda x, w: torch.exp(x).sum(-1), 48, 1),
    "static rows": (lambda x, w: torch.where(x > 0, x, w * x).sum(-1), 96, 2),
}


@pytest.mark.parametrize("case", SUMS)
def test_the_template_of_the_tutorial_serves_any_elementwise_work(case, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import row_sums

    function, columns, inputs = SUMS[case]
    generator = torch.Generator().manual_seed(columns)
    args = [torch.randn(s, generator=generator) for s in ((7, columns), (columns,))]
    dynamic = {} if case == "static rows" else {"x": {0: "B"}}
    config = make_config(target="llvm", dynamic=dynamic)
    target = make_target("llvm")
    passes = pipeline.front(target)
    captured = capture(function, args, None, config)
    mod = pipeline.run(captured.mod, passes, target, config, pipeline.Trace())
    (func,) = (f for f in mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc))
    problem = row_sums.match(func, target)
    assert (problem.columns, problem.inputs) == (columns, inputs)
    assert isinstance(problem.rows, int) == (case == "static rows")
    expected = function(*(a.double() for a in args)).numpy()
    tensors = [tvm.runtime.tensor(a.numpy()) for a in args[:inputs]]
    for knobs in row_sums.space(problem, target):
        made = row_sums.lower(func, problem, knobs, target).with_attr("global_symbol", "main")
        out = tvm.runtime.tensor(np.full(7, np.nan, np.float32))
        tvm.compile(tvm.IRModule({"main": made}), target)["main"](*tensors, out)
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)
