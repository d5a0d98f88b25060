"""The 8-bit benchmark as far as a machine without a GPU goes: problems, checks, tables."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import gemm_common as gemm
import gemm_timing
import quantize_gpu
import quantize_rows
import quantize_tables
import quantized_gemm
import render
import tune_suite

from tvmcap.base import codegen
from tvmcap.kernel import spaces, tasks

SMALL = gemm.Shape(33, 256, 512)


def test_the_libraries_of_the_four_shapes_have_names() -> None:
    options = quantize_gpu.parse(["build", "folder"])
    found = quantize_gpu.names(quantize_gpu.shapes_of(options))
    assert len(found) == len(set(found)) == 4 * 5 and "8192x8192-int8-alone" in found
    for shape in quantized_gemm.SHAPES:
        for scheme in quantized_gemm.SCHEMES:
            paths = quantize_rows.libraries(Path(), shape, scheme)
            assert {p.stem for p in paths.values()} <= set(found)
    one = quantize_gpu.parse(["run", "folder", "--shapes", "1x16x32"])
    assert quantize_gpu.shapes_of(one) == (gemm.Shape(1, 16, 32),)


@pytest.mark.parametrize("scheme", quantized_gemm.SCHEMES)
def test_a_wrong_result_is_seen(scheme: str) -> None:
    inputs = quantize_rows.inputs_of(SMALL, scheme, seed=3, device="cpu")
    one, right = inputs.sets[0], inputs.reference.clone()

    def call(s: dict[str, torch.Tensor]) -> None:
        s["out"].copy_(right)

    def bf16(s: dict[str, torch.Tensor]) -> None:
        s["out"].copy_(gemm_timing.linear_gelu(s["x"], s["nk"], s["b"]))

    calls = {"ours": call, "kernel": call, "bf16": bf16}
    found = quantize_rows.checked(calls, inputs, scheme)
    assert found["sqnr_db"] > (35 if scheme == "int8" else 25)
    assert torch.equal(inputs.reference, right) and one["scale"].shape == (512,)
    for name in calls:
        wrong = {**calls, name: lambda s: s["out"].copy_(right + 0.2 * inputs.scale)}
        with pytest.raises(AssertionError, match=f"{name} is wrong"):
            quantize_rows.checked(wrong, inputs, scheme)
    with pytest.raises(AssertionError, match="ours is wrong: relative error inf"):
        quantize_rows.checked({**calls, "ours": lambda s: None}, inputs, scheme)


@pytest.mark.parametrize("scheme", quantized_gemm.SCHEMES)
def test_what_torch_compiles_is_the_same_layer(scheme: str) -> None:
    inputs = quantize_rows.inputs_of(SMALL, scheme, seed=4, device="cpu")
    one = inputs.sets[0]
    function = quantize_rows.COMPILED[scheme][1]
    try:
        out = function(*(one[part] for part in ("x", "w", "scale", "bias")))
    except RuntimeError as e:
        pytest.skip(f"no product of e4m3 rows on this CPU: {e}")
    out = out if scheme == "int8" else torch.nn.functional.gelu(out.float(), approximate="tanh")
    assert inputs.error(out.bfloat16()) <= gemm_timing.TOLERANCE


@pytest.mark.parametrize("scheme", quantized_gemm.SCHEMES)
def test_baselines_that_are_left_out_are_named(scheme: str) -> None:
    inputs = quantize_rows.inputs_of(SMALL, scheme, seed=4, device="cpu")
    name = quantize_rows.COMPILED[scheme][0]
    ready, missing = quantize_rows.baselines(inputs, scheme, argparse.Namespace(no_compile=True))
    assert missing == {name: "left out"} and ("scaled_mm" in ready) == (scheme == "e4m3")


@pytest.mark.parametrize("scheme", quantized_gemm.SCHEMES)
def test_problems_in_8_bits_can_be_tuned(scheme: str, tmp_path: Path) -> None:
    """As ``tune_suite.py tune`` reads them: two tasks, settings to try, bytes of one a number."""
    path = tmp_path / f"1024x512-{scheme}.json"
    tune_suite.capture_one(path.stem, path)
    import tvm

    mod = tvm.ir.load_json(path.read_text())
    found = {t.template.name: t for t in tasks.extract(mod, gemm.target(), spaces.find)}
    assert sorted(found) == ["hopper_gemm", "row_norm"]
    task, sizes = found["hopper_gemm"], {found["hopper_gemm"].vars[0].name: 16}
    rows, k, n = 16, 1024, 512
    assert task.problem.bytes(sizes) == rows * k + k * n + 4 * rows + 8 * n + 2 * rows * n
    points = task.template.space(task.problem, gemm.target())
    assert len(points) > 100 and all(task.template.estimate(task.problem, points[:50], None))
    wide = tasks.make_task(gemm.block(k, n), gemm.target(), spaces.find)
    narrow_us, wide_us = (
        min(t.template.estimate(t.problem, t.template.space(t.problem, None), None))
        for t in (task, wide)
    )
    assert narrow_us < wide_us
    knobs = task.template.default(task.problem, gemm.target())
    assert isinstance(task.template.lower(task.func, task.problem, knobs, None), tvm.tirx.PrimFunc)


def test_the_rows_that_are_tuned() -> None:
    options = argparse.Namespace(shapes=None, rows=None, schemes="int8,e4m3")
    names = tune_suite.names_of(options)
    assert len(names) == 8 and "4096x4096-e4m3" in names
    assert tune_suite.sizes_of("4096x4096-e4m3", options) == (2048,)
    assert tune_suite.sizes_of("softmax", options) == (8192,)
    options.rows = "16,64"
    assert tune_suite.sizes_of("1024x4096-int8", options) == (16, 64, 2048)
    assert tune_suite.sizes_of("8x8-int8", options) == ()
    options.schemes = "int4"
    with pytest.raises(SystemExit, match="expected int8,e4m3"):
        tune_suite.names_of(options)
    options.schemes = None
    assert "1024x4096" in tune_suite.names_of(options)


def test_the_product_alone_reads_what_the_other_kernel_wrote() -> None:
    mod = quantized_gemm.fused(256, 512, "int8")
    alone = quantized_gemm.alone(mod)["main"]
    found = {p.name: str(p.ty.dtype.dtype) for p in alone.params}
    assert found == {"top": "float32", "q": "int8"}
    assert str(alone.ret_ty.dtype.dtype) == "bfloat16"
    assert alone.attrs["tir_var_upper_bound"] == mod["main"].attrs["tir_var_upper_bound"]


@pytest.mark.skipif(codegen.find_nvcc() is None, reason="no nvcc")
def test_weights_are_arguments_of_what_is_measured(tmp_path: Path) -> None:
    mod = quantized_gemm.alone(quantized_gemm.fused(256, 512, "e4m3"))
    manifest = quantized_gemm.write(mod, tmp_path / "alone.so", None)
    assert manifest.signature.arg_names == ("top", "q", "w", "scale", "b")
    assert {t.dtype for t in manifest.signature.inputs} == {"float32", "float8_e4m3fn"}
    assert [s["served_by"] for s in manifest.coverage] == ["template:hopper_gemm"]
    assert manifest.kernels_per_call == 1 and (tmp_path / "alone.so").stat().st_size < 1 << 20


def row(m: int, k: int, n: int, scheme: str, us: dict[str, float]) -> dict[str, Any]:
    samples = {name: [value, value, value] for name, value in us.items()}
    size = {"kind": "8 bits", "scheme": scheme, "M": m, "K": k, "N": n, "sqnr_db": 37.5}
    return {**size, **quantize_rows.figures(samples, 2 * m * k * n, scheme)}


def test_rows_come_to_figures_and_a_table(tmp_path: Path) -> None:
    int8 = {"ours": 1000.0, "kernel": 900.0, "bf16": 1500.0, "torch_compile_int8": 1400.0}
    rows = [row(8192, 8192, 8192, "int8", int8)]
    rows.append(row(2048, 4096, 4096, "int8", {"ours": 50.0, "kernel": 40.0, "bf16": 80.0}))
    rows.append(row(512, 64, 64, "e4m3", {"ours": 5.0, "kernel": 4.0, "bf16": 8.0, "scaled_mm": 4}))
    rows.append({"kind": "8 bits", "scheme": "int8", "M": 1, "K": 1, "N": 1, "failed": "E: a | b"})
    found = quantize_tables.summary(rows)
    assert found["int8_vs_bf16_at_8192_cubed"] == found["int8_least_vs_bf16"] == 1.5
    assert found["int8_vs_bf16_at_2048x4096x4096"] == 1.6 and found["failed"] == 1
    assert found["int8_tops_alone_at_8192_cubed"] == round(2 * 8192**3 / 900 / 1e6, 1)
    assert found["int8_least_vs_torch_compile"] == 1.4 and found["e4m3_least_vs_scaled_mm"] == 0.8
    assert [r["complete"] for r in rows[:3]] == [True, False, False]
    head, body = quantize_tables.table(lambda t: "-" if t is None else f"{t['median']:g}")(rows)
    assert [len(line) for line in body] == [len(head)] * 4 and "failed: E: a / b" in body[3]
    assert body[0][4:9] == ["1000", "900", "1222", "1500", "1400"] and body[1][8] == "-"
    meta = {"card": "A card", "versions": {}, "date": "2026-01-01", "command": "x", "source": "s"}
    path = tmp_path / "quantize_gpu.json"
    path.write_text(json.dumps({"meta": meta, "rows": rows}))
    text = render.table("quantize_gpu", tmp_path, lambda folders: "s")
    assert "A card" in text and "1.50x" in text and "tale" not in text


@pytest.mark.gpu
def test_a_small_shape_on_a_gpu(tmp_path: Path) -> None:
    script = str(Path(quantize_gpu.__file__))
    out, shape = tmp_path / "out.json", ["--shapes", "300x1024x512"]
    for verb in (["build"], ["run", "--json", str(out), "--no-compile"]):
        command = [sys.executable, script, verb[0], str(tmp_path), *verb[1:], *shape]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    assert [r["scheme"] for r in rows] == ["int8", "e4m3"] and not any("failed" in r for r in rows)
    assert rows[0]["sqnr_db"] > 35 and "bf16" in rows[0]["ratios"]
