"""The bands of loops around the main block, and what they touch."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te

from tvmcap.kernel import loop_bands
from tvmcap.kernel.cost_model import PRIOR
from tvmcap.kernel.loop_body import Access, fetched

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


def lines(rows: int, columns: int) -> int:
    """Return the bytes of the cache lines of so many elements in each of some rows."""
    return rows * -(-columns // 16) * 64


def test_bytes_that_bands_touch() -> None:
    found = tiled()
    touched = [lines(2, 1) + lines(1, 24) + lines(2, 24)]
    touched += [lines(2, 4) + lines(4, 24) + lines(2, 24)]
    touched += [lines(12, 4) + lines(4, 48) + lines(12, 48)]
    touched += [
        lines(12, 40) + lines(40, 48) + lines(12, 48),
        lines(M, K) + lines(K, N) + lines(M, N),
    ]
    runs = np.cumprod([48, 4, 12, 10, 4])
    for i, (count, times) in enumerate(zip(touched, runs, strict=True), 1):
        assert found[f"log_bytes_{i}"] == pytest.approx(np.log2(1 + count))
        assert found[f"log_reuse_{i}"] == pytest.approx(np.log2(1 + times / count))


def test_loads_of_the_code() -> None:
    """Of the body 2 x 24, four sums: 8 loads of x, 4 x 2 registers of w, 4 read and written."""
    found = tiled(step=8)
    loads, operations = 8 + 4 * 2 + 2 * 2 * 2, 2 * 4 * 2
    assert found["log_loads_body"] == found["log_loads_sums"]
    assert found["log_loads_body"] == pytest.approx(np.log2(loads / operations))
    assert found["log_registers_body"] == pytest.approx(np.log2(1 + 4 * 2 + 2 * 2))
    assert found["log_rest"] == np.log2(3) and found["rest_loads_contiguous"] == 1
    assert found["log_issue"] == pytest.approx(np.log2(2 / 24 * (1 + loads / operations)))


def test_other_blocks_and_where_results_are_used() -> None:
    sch = product()
    i, _, _ = sch.get_loops(sch.get_sblock("out"))
    plain = loop_bands.bands(sch.mod["main"], 16)
    assert plain["log_other_work"] == pytest.approx(np.log2(1 / K + 1e-4))
    assert (plain["log_shared"], plain["log_inside"]) == (1.0, np.log2(1 + M * N * K))
    sch.parallel(i)
    four = loop_bands.bands(sch.mod["main"], 16, 4)
    assert four["log_rounds"] == pytest.approx(0) and plain["log_rounds"] == 0
    assert four["log_other_work"] == pytest.approx(np.log2(4 / K + 1e-4))
    assert four[PRIOR] < plain[PRIOR]


def test_what_a_cache_fetches() -> None:
    inside = {"i": frozenset("i"), "j": frozenset("j"), "k": frozenset("k")}
    x = Access(4, (frozenset("i"), frozenset("k")), frozenset(), False)
    w = Access(4, (frozenset("k"), frozenset("j")), frozenset(), False)
    loops = [("j", 16), ("k", 16), ("i", 32)]
    assert fetched([x, w], inside, loops, 1 << 20) == lines(32, 16) + lines(16, 16)
    # x moves with i, and the tile of w, which fits, stays
    small = lines(16, 16) + lines(1, 16)
    assert fetched([x, w], inside, loops, small) == 32 * lines(1, 16) + lines(16, 16)


def test_a_kernel_without_sums_or_vectors() -> None:
    x = te.placeholder((8, 8), "float32", "x")
    func = te.create_prim_func([x, te.compute((8, 8), lambda i, j: x[j, i], "out")])
    found = loop_bands.bands(func, 16)
    assert found["log_band_0"] == pytest.approx(np.log2(65)) and found["lanes"] == 1 / 16
    assert found["unroll_step"] == 0 and found["log_band_1"] == 1.0
