"""Casts to e4m3 on llvm are torch's, bit by bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
import tvm
from tvm import te

from tvmcap.base.codegen import make_target
from tvmcap.kernel import fallback


def test_every_kind_of_value_rounds_as_in_torch() -> None:
    target = make_target("llvm")
    a = te.placeholder((4096,), "float32", name="a")
    b = te.compute((4096,), lambda i: a[i].astype("float8_e4m3fn"), name="b")
    func, rule = fallback.schedule(te.create_prim_func([a, b]), target)
    assert rule == "cpu"
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(4096) * 10 ** rng.uniform(-4, 2, 4096)).astype(np.float32)
    x[:6] = [np.nan, 448, -448, 2.0**-10, -0.0, 2.0**-6]
    x[8:300] = np.arange(292) * 2.0**-10  # subnormals, and ties between them
    x[300:415] = np.arange(115) * 4.0
    x = np.clip(x, -448, 448)
    out = tvm.runtime.tensor(np.zeros(4096, ml_dtypes.float8_e4m3fn))
    tvm.compile(module, target)["main"](tvm.runtime.tensor(x), out)
    want = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(out.numpy().view(np.uint8), want)
