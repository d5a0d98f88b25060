"""The bands of loops around the main block, and what they touch."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te

from tvmcap.kernel import loop_bands

M, N, K = 24, 96, 40


def product():
    x, w = te.placeholder((M, K), "float32", "x"), te.placeholder((K, N), "float32", "w")
    k = te.reduce_axis((0, K), "k")
    out = te.compute((M, N), lambda i, j: te.sum(x[i, k] * w[k, j], k), "out")
    after = te.compute((M, N), lambda i, j: out[i, j] * out[i, j], "after")
    return tvm.s_tir.Schedule(te.create_prim_func([x, w, after]))


def tiled(step: int = 16, along: str = "j"):
    """Return the bands of a product in the order i0 j0 k0 i1 j1 k1 i2, and j2 as vectors."""
    sch = product()
    block = sch.get_sblock("out")
    i, j, k = sch.get_loops(block)
    i0, i1, i2 = sch.split(i, [2, 6, 2])
    j0, j1, j2 = sch.split(j, [2, 2, 24])
    k0, k1 = sch.split(k, [10, 4])
    last = (i2, j2) if along == "j" else (j2, i2)
    sch.reorder(i0, j0, k0, i1, j1, k1, *last)
    sch.vectorize(last[-1])
    sch.parallel(i0)
    sch.annotate(i0, "pragma_auto_unroll_max_step", step)
    return loop_bands.bands(sch.mod["main"], 16)


def test_bands_are_the_tiles_from_the_inside_out() -> None:
    found = tiled()
    sizes = [round(2 ** found[f"log_band_{i}"] - 1) for i in range(5)]
    assert sizes == [2 * 24, 4, 6 * 2, 10, 2 * 2]
    assert round(2 ** found["log_main_parallel"] - 1) == 2
    assert set(found) == set(loop_bands.NAMES)


def test_vectors_and_registers() -> None:
    found = tiled()
    assert found["lanes"] == 1.5 and found["lane_use"] == 0.75
    assert found["accumulators"] == 2 * 2  # two vectors of 16 lanes hold 24 elements
    assert (found["loads_contiguous"], found["loads_same"], found["loads_apart"]) == (1, 1, 0)
    assert found["stores_contiguous"] == 1
    across = tiled(along="i")
    assert across["loads_apart"] == 1 and across["stores_contiguous"] == 0


@pytest.mark.parametrize(("step", "body"), [(0, 1), (7, 2), (8, 8), (16, 16), (1000, 960)])
def test_what_tvm_unrolls(step: int, body: int) -> None:
    found = tiled(step)
    assert round(2 ** found["log_unrolled_body"] - 1) == body
    assert found["tile_is_unrolled"] == (step >= 2)
    assert found["sums_are_unrolled"] == (step >= 8)


def test_bytes_that_bands_touch() -> None:
    found = tiled()
    elements = [2 + 24 + 48, 2 * 4 + 4 * 24 + 48, 12 * 4 + 4 * 48 + 12 * 48]
    elements += [12 * 40 + 40 * 48 + 12 * 48, M * K + K * N + M * N]
    runs = np.cumprod([48, 4, 12, 10, 4])
    for i, (count, times) in enumerate(zip(elements, runs, strict=True), 1):
        assert found[f"log_bytes_{i}"] == pytest.approx(np.log2(1 + 4 * count))
        assert found[f"log_reuse_{i}"] == pytest.approx(np.log2(1 + times / (4 * count)))


def test_a_kernel_without_sums_or_vectors() -> None:
    x = te.placeholder((8, 8), "float32", "x")
    func = te.create_prim_func([x, te.compute((8, 8), lambda i, j: x[j, i], "out")])
    found = loop_bands.bands(func, 16)
    assert found["log_band_0"] == pytest.approx(np.log2(65)) and found["lanes"] == 1 / 16
    assert found["unroll_step"] == 0 and found["log_band_1"] == 1.0
