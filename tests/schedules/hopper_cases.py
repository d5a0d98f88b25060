"""The settings of the Hopper GEMM that run on a GPU, in groups that are compiled together."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.schedules.hopper import Case
from tests.schedules.products import TARGET, product
from tvmcap.schedules import hopper_gemm as hopper
from tvmcap.schedules.hopper_columns import GROUPS
from tvmcap.schedules.hopper_gemm import TILES, Knobs

ROWS = tuple({"B": rows} for rows in (1, 63, 65, 2049))
EIGHTS = tuple({"T": rows} for rows in (1, 8, 257))
SWAPPED: dict[str, Any] = {
    "groups": "columns",
    "group": 1,
    "persistent": False,
    "late": False,
    "tma_store": False,
    "swapped": True,
}


def choose(rng: random.Random, gemm: Any, groups: str, tiles: list[Any], **fixed: Any) -> Knobs:
    """Return a setting that fits, what is not fixed at random; ``tiles`` are tried in order."""
    dependent = rng.random() < 0.7
    rest = {
        "group": rng.choice((1, 4, 16)),
        "late": rng.random() < 0.5,
        "dependent": dependent,
        "warm": dependent and rng.random() < 0.5,
        "groups": groups,
        **fixed,
    }
    rest["persistent"] = groups == "tiles" or rest.get("split", 1) > 1 or rng.random() < 0.7
    steps = rng.choice(((64,), (64,), (128, 64)))
    for (bm, bn, _), bk in itertools.product(tiles, steps):
        knobs = hopper.deepest(gemm, Knobs(bm=bm, bn=bn, bk=bk, stages=2, **rest))
        if knobs is not None:
            stages = rng.choice((2, 3, knobs.stages, knobs.stages))
            return replace(knobs, stages=min(stages, knobs.stages))
    raise AssertionError(f"no tile of {groups} fits {fixed}")


def of_groups(groups: str, rng: random.Random) -> list[Any]:
    """Return the tiles of a way to divide work, shuffled."""
    tiles = [tile for tile in TILES if tile[2] == groups]
    return rng.sample(tiles, len(tiles))


@functools.cache
def typical(layout: str, dtype: str = "bfloat16", **shape: Any) -> Any:
    """Return a product of many columns, for what fits."""
    shape = {"n": 8192, "k": 520, "layout": layout, "dtype": dtype, **shape}
    return hopper.match(product(**shape), TARGET)


def modes(groups: str) -> list[Case]:
    """Every cluster, split and way to leave; all tiles; N and K just over a tile, or many tiles."""
    rng, cases, used = random.Random(f"modes {groups}"), [], set()
    ways = ((1, True), (1, False), (2, False), (4, False))
    for i, ((cm, cn), (split, tma)) in enumerate(itertools.product(((1, 1), (2, 1), (1, 2)), ways)):
        layout = rng.choice(("nk", "nk", "kn"))
        tiles = sorted(of_groups(groups, rng), key=lambda tile: tile in used)
        fixed = {"cluster_m": cm, "cluster_n": cn, "split": split, "tma_store": tma}
        knobs = choose(rng, typical(layout), groups, tiles, **fixed)
        used.add((knobs.bm, knobs.bn, groups))
        n = knobs.bn * rng.choice((cn, 20)) + 8
        k = max(rng.choice((520, 72, 8, 1032)), knobs.bk * split - 56)
        dtype = ("bfloat16", "float16")[i % 2]
        shape = {"n": n, "k": k, "layout": layout, "dtype": dtype}
        cases.append(Case(f"modes_{groups}_{i}", knobs, shape, (), ROWS))
    rest = [tile for tile in of_groups(groups, rng) if tile not in used]
    for i, tile in enumerate(rest):
        direct = Knobs(*tile[:2], stages=2, groups=groups, tma_store=False)
        tma = i % 2 == 0 or hopper.deepest(typical("nk"), direct) is None
        knobs = choose(rng, typical("nk"), groups, [tile], tma_store=tma)
        shape = {"n": 20 * knobs.bn + 8, "k": 200, "layout": "nk"}
        cases.append(Case(f"tiles_{groups}_{i}", knobs, shape, (), ROWS))
    return cases


def layouts() -> list[Case]:
    """A and B in either majority, stored both ways; K of any size where neither has it inside."""
    rng, cases = random.Random("layouts"), []
    sides = itertools.product(("mk", "km"), ("kn", "nk"), GROUPS, (True, False))
    for i, (left, right, groups, tma) in enumerate(sides):
        cluster = ((1, 1), (2, 1), (1, 2))[i % 3]
        fixed = {"cluster_m": cluster[0], "cluster_n": cluster[1], "tma_store": tma}
        knobs = choose(rng, typical(right), groups, of_groups(groups, rng), **fixed)
        rows, sizes = ("B", ROWS) if left == "mk" else ("8*T", EIGHTS)
        k = 77 if (left, right) == ("km", "kn") else 200
        n = knobs.bn * cluster[1] + 8
        shape = {"n": n, "k": k, "layout": right, "a_layout": left, "rows": rows}
        cases.append(Case(f"layout_{left}_{right}_{i}", knobs, shape, (), sizes))
    return cases


def batches() -> list[Case]:
    """Batches of fixed and of symbolic size, an operand shared or not."""
    rng, cases = random.Random("batches"), []
    kinds = itertools.product(((3,), ("H",), ("H", 2)), ("", "a", "b"), ("mk", "km"))
    for i, (batch, shared, left) in enumerate(kinds):
        split, tma = ((1, True), (1, False), (2, False))[(i + i // 9) % 3]
        groups, right = GROUPS[i // 2 % 3], ("nk", "kn")[i % 5 % 2]
        fixed = {"split": split, "tma_store": tma}
        knobs = choose(rng, typical(right), groups, of_groups(groups, rng), **fixed)
        rows, name, many = ("B", "B", (1, 65)) if left == "mk" else ("8*T", "T", (1, 17))
        shape = {"n": 264, "k": 136, "layout": right, "a_layout": left, "rows": rows}
        shape |= {"batch": batch, "shared": (shared,) if shared else ()}
        sizes = tuple(
            {name: r, **({"H": h} if "H" in batch else {})}
            for r, h in zip(many, (5, 2), strict=True)
        )
        cases.append(Case(f"batch_{i}", knobs, shape, (), sizes))
    return cases


def numbers() -> list[Case]:
    """tf32, float32 results, two outputs; through every way to leave."""
    rng, cases = random.Random("numbers"), []
    ways = ((1, True), (1, False), (2, False))
    for i, (groups, (split, tma)) in enumerate(itertools.product(GROUPS, ways)):
        fixed = {"split": split, "tma_store": tma}
        out = "bfloat16" if tma else "float32"
        shape = {"n": 264, "k": 68, "layout": "nk", "dtype": "float32", "out": out, "tf32": True}
        gemm = hopper.match(product(**shape), TARGET)
        knobs = choose(rng, gemm, groups, of_groups(groups, rng), **fixed)
        cases.append(Case(f"tf32_{i}", knobs, shape, (), ROWS))
        second = "float16" if tma else "float32"
        shape = {"n": 264, "k": 520, "dtype": "float16"}
        case = Case(f"outputs_{i}", Knobs(), shape, ("float16", second), ROWS)
        gemm = hopper.match(case.func, TARGET)
        knobs = choose(rng, gemm, groups, of_groups(groups, rng), **fixed)
        cases.append(Case(case.name, knobs, shape, case.outs, ROWS))
    return cases


def sizes() -> list[Case]:
    """Rows of several dimensions with a residual; symbolic N, K and both."""
    rng, cases = random.Random("sizes"), []
    ways = ((1, True), (1, False), (4, False))
    leads = tuple({"T": t, "B": b} for t, b in ((3, 11), (1, 65), (5, 1)))
    odd = tuple({"T": t, "B": b} for t, b in ((1, 65), (8, 63), (65, 257)))
    shapes = [
        ({"lead": ("T",), "residual": True, "n": 136, "k": 520}, leads),
        ({"lead": (2, "T"), "residual": True, "n": 264, "k": 456, "layout": "nk"}, leads),
        ({"n": "8*T", "k": 456}, odd),
        ({"n": "8*T", "k": 520, "layout": "nk", "dtype": "float16"}, odd),
        ({"n": 264, "k": "8*T"}, odd),
        ({"n": "8*T", "k": "8*T", "layout": "nk"}, odd),
    ]
    for i, ((shape, values), (split, tma)) in enumerate(itertools.product(shapes, ways)):
        groups = GROUPS[(i + i // 3) % 3]
        gemm = hopper.match(product(**shape), TARGET)
        fixed = {"split": split, "tma_store": tma}
        knobs = choose(rng, gemm, groups, of_groups(groups, rng), **fixed)
        cases.append(Case(f"sizes_{i}", knobs, shape, (), values))
    return cases


def odd() -> list[Case]:
    """Columns of which TMA stores none, odd ones among them; and exchanged operands."""
    rng, cases = random.Random("odd"), []
    for i, (n, split) in enumerate(itertools.product((1, 7, 65, 257, "T", 100), (1, 2))):
        groups = GROUPS[(i + i // 3) % 3]
        residual = i % 2 == 0
        shape = {"n": n, "k": 520, "layout": "nk", "out": "float32", "residual": residual}
        gemm = hopper.match(product(**shape), TARGET)
        fixed = {"split": split, "tma_store": False}
        knobs = choose(rng, gemm, groups, of_groups(groups, rng), **fixed)
        sizes = tuple({**rows, "T": 129} for rows in ROWS) if n == "T" else ROWS
        cases.append(Case(f"odd_{i}", knobs, shape, (), sizes))
    for i, (bm, bn, split) in enumerate(((64, 8, 8), (128, 64, 1), (64, 32, 4), (128, 16, 2))):
        knobs = Knobs(bm, bn, 128, 2, split=split, dependent=i % 2 == 0, **SWAPPED)
        shape = {"n": 257, "k": 520, "layout": "nk"}
        cases.append(Case(f"swapped_{i}", knobs, shape, (), ROWS))
    return cases


def chain() -> list[Case]:
    """Pairs of a kernel launched early and the same launched in turn."""
    changes: list[dict[str, Any]] = [
        {"bm": 128, "bn": 128, "groups": "tiles", "stages": 4, "warm": True},
        {"bm": 128, "bn": 192, "groups": "rows", "stages": 3, "cluster_n": 2},
        {"bm": 64, "bn": 256, "groups": "columns", "stages": 4, "cluster_m": 2, "warm": True},
        {"bm": 128, "bn": 64, "groups": "rows", "stages": 4, "split": 4, "tma_store": False},
        {"bm": 64, "bn": 16, "bk": 128, "stages": 3, "split": 2, **SWAPPED},
    ]
    shape = {"n": 1024, "k": 1024, "layout": "nk", "gelu": False}
    cases = []
    for i, change in enumerate(changes):
        early = Knobs(**{**change, "dependent": True})
        cases.append(Case(f"early_{i}", early, shape))
        cases.append(Case(f"late_{i}", replace(early, dependent=False, warm=False), shape))
    return cases


GROUPS_OF_CASES: dict[str, Callable[[], list[Case]]] = {
    **{f"modes_{groups}": functools.partial(modes, groups) for groups in GROUPS},
    "layouts": layouts,
    "batches": batches,
    "numbers": numbers,
    "sizes": sizes,
    "odd": odd,
}
