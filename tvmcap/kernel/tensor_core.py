"""Tensor cores in MetaSchedule's search: the space of products of bf16, fp16 and int8 on sm_80+."""

from __future__ import annotations

import contextlib
from typing import Any

from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import ScheduleError
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.schedule_rule import PyScheduleRule
from tvm.s_tir.meta_schedule.schedule_rule.multi_level_tiling import ReuseType

from tvmcap.kernel import prim_func
from tvmcap.kernel.tensor_intrinsics import (
    SHARED,
    available,
    import_tensor_intrinsics,
    intrinsic_group,
)

DTYPES = ("bfloat16", "float16", "int8")


def space(func: Any, target: Any) -> Any:
    """Return MetaSchedule's space generator for a kernel, tensor cores first where there are."""
    if target.kind.name != "cuda":
        if uses_intrinsics(func, target):
            return "post-order-apply"
        kind = str(target.kind.name)
        return ms.space_generator.PostOrderApply(None, kind, kind, kind)
    rules = list(ms.schedule_rule.ScheduleRule.create("cuda"))
    if len(prim_func.written(func)) > 1:
        inline = ms.schedule_rule.AutoInline
        rules = [_inline_forward() if isinstance(rule, inline) else rule for rule in rules]
    kind = "cuda"
    if available(target):
        import_tensor_intrinsics()
        rules, kind = [TensorCoreRule(), *rules], "cuda-tensorcore"
    return ms.space_generator.PostOrderApply(
        sch_rules=rules,
        postprocs=ms.postproc.Postproc.create(kind),
        mutator_probs=ms.mutator.Mutator.create(kind),
    )


def uses_intrinsics(func: Any, target: Any) -> bool:
    """Whether the space of a kernel needs TVM's intrinsics; a CPU's are of 8-bit products."""
    dtypes = {str(p.dtype) for p in func.params if prim_func.is_tensor(p)}
    return target.kind.name != "llvm" or not dtypes.isdisjoint(("int8", "uint8"))


def _inline_forward() -> Any:
    """Return TVM's rule of inlining, but never backward.

    TVM drops the buffer of a producer that another consumer still reads.
    """
    return ms.schedule_rule.AutoInline(
        into_producer=False,
        into_consumer=True,
        inline_const_tensor=True,
        disallow_if_then_else=False,
        require_injective=False,
        require_ordered=False,
        disallow_op=None,
    )


def _tiling() -> Any:
    """Return TVM's rule that tiles a product and marks what to tensorize, with our intrinsics."""
    groups = [intrinsic_group(dtype, trans) for dtype in DTYPES for trans in (False, True)]
    return ms.schedule_rule.MultiLevelTilingTensorCore(
        intrin_groups=groups,
        structure="SSSRRSRS",
        tile_binds=["blockIdx.y", "blockIdx.x", "threadIdx.y"],
        max_innermost_factor=4,
        vector_load_lens=[1, 2, 4, 8],
        reuse_read=ReuseType("must", [4], SHARED),
        reuse_write=ReuseType("must", [2], SHARED),
        use_software_pipeline=False,
    )


@derived_object
class TensorCoreRule(PyScheduleRule):  # type: ignore[misc]
    """TVM's tensor-core tiling, with the epilogue in the same kernel and bfloat16 rows padded."""

    def __init__(self) -> None:
        super().__init__()
        self.tiling = _tiling()

    def _initialize_with_tune_context(self, context: Any) -> None:
        self.tiling._initialize_with_tune_context(context)

    def apply(self, sch: Any, block: Any) -> Any:
        """Return the tilings of a product; ``[sch]`` for any other block."""
        found = list(self.tiling.apply(sch, block))
        for tiled in found:
            stages = _stages(tiled)
            if any(_scope(stage) == "wmma.accumulator" for stage in stages):
                _pad_rows(tiled, stages)
                _inline_epilogue(tiled, stages)
        return found

    def clone(self) -> Any:
        """Return a rule of the same tiling."""
        return TensorCoreRule()


def _stages(sch: Any) -> list[Any]:
    """List the blocks of the function, without a trace of having asked."""
    probe = sch.copy()
    return [probe.get(b) for b in probe.get_child_blocks(probe.get_sblock("root"))]


def _scope(stage: Any) -> str:
    return str(stage.writes[0].source.scope())


def _pad_rows(sch: Any, stages: list[Any]) -> None:
    """Pad rows of bfloat16 in shared memory by 16 bytes, as TVM pads float16, against conflicts."""
    for stage in stages:
        if _scope(stage) == SHARED and str(stage.writes[0].source.dtype) == "bfloat16":
            sch.storage_align(sch.get_sblock(stage.name_hint), 0, axis=-2, factor=32, offset=8)


def _inline_epilogue(sch: Any, stages: list[Any]) -> None:
    """Move elementwise work into the copy of a tile from shared to global memory.

    What TVM refuses to move stays a kernel of its own, and so do two outputs.
    """
    copies = [s for s in stages if _scope(s) == "global" and s.reads[0].source.scope() == SHARED]
    for stage in stages:
        if stage not in copies and _is_spatial(stage) and _scope(stage) == "global":
            with contextlib.suppress(ScheduleError):
                sch.compute_inline(sch.get_sblock(stage.name_hint))
    for stage in copies:
        consumers = sch.get_consumers(sch.get_sblock(stage.name_hint))
        if len(consumers) == 1:
            with contextlib.suppress(ScheduleError):
                sch.reverse_compute_inline(consumers[0])


def _is_spatial(stage: Any) -> bool:
    return all(v.iter_type == tirx.IterVar.DataPar for v in stage.iter_vars)
