"""Pieces of Hopper kernels: tensor maps, wgmma descriptors, barriers and messages of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmcap.schedules.hopper_plan import OPERANDS

_LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes"
_WARM = "cp.async.bulk.prefetch.tensor.{}d.L2.global.tile"
_STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.tile.bulk_group"
_CLUSTER_MEET = (
    "__forceinline__ __device__ void tvmcap_cluster_meet()"
    '{ asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");'
    '  asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }'
)
_ARRIVE = (
    "__forceinline__ __device__ void tvmcap_arrive(void* barrier, int rank)"
    "{ unsigned at = __cvta_generic_to_shared(barrier);"
    '  asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;'
    ' mbarrier.arrive.shared::cluster.b64 _, [remote]; }"'
    ' :: "r"(at), "r"(rank) : "memory"); }'
)
# acquire at the scope of the cluster would drop the L1 cache at every wait
_WAIT = (
    "__forceinline__ __device__ void tvmcap_wait(void* barrier, unsigned parity)"
    "{ unsigned at = __cvta_generic_to_shared(barrier);"
    '  asm volatile("{ .reg .pred done; WAIT:'
    " mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
    ' @done bra.uni DONE; bra.uni WAIT; DONE: }" :: "r"(at), "r"(parity) : "memory"); }'
)
_SEND = (
    "__forceinline__ __device__ void tvmcap_send("
    "void* local, void* barrier, int rank, float a, float b, float c, float d)"
    "{ unsigned at = __cvta_generic_to_shared(local), bar = __cvta_generic_to_shared(barrier);"
    '  asm volatile("{ .reg .b32 to, full; mapa.shared::cluster.u32 to, %0, %2;'
    " mapa.shared::cluster.u32 full, %1, %2;"
    " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6},"
    ' [full]; }"'
    ' :: "r"(at), "r"(bar), "r"(rank), "f"(a), "f"(b), "f"(c), "f"(d) : "memory"); }'
)
_PACK = {
    "bfloat16": (
        "tvmcap_pack_bf16",
        "__forceinline__ __device__ unsigned tvmcap_pack_bf16(float low, float high)"
        '{ unsigned out; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));'
        " return out; }",
    ),
    "float16": (
        "tvmcap_pack_f16",
        "__forceinline__ __device__ unsigned tvmcap_pack_f16(float low, float high)"
        '{ unsigned out; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));'
        " return out; }",
    ),
}


def wgmma(dtype: str, n: int) -> Callable[[Any, int, Any, Any, Any, tuple[int, ...]], Any]:
    """Return what multiplies 64 rows by ``n`` columns into registers ``acc[first:]``.

    ``(acc, first, a, b, add, flags)``: descriptors of A and B, whether the sums are added to, and
    the immediates of the instruction. Sums are float32, of bytes int32.
    """
    kind, item = OPERANDS[dtype]
    sums = "s32" if dtype == "int8" else "f32"
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k{32 // item}.{sums}.{kind}.{kind}"

    def table(acc: Any, first: int, a: Any, b: Any, add: Any, flags: tuple[int, ...]) -> Any:
        return T.ptx[name](*[acc[first + i] for i in range(n // 2)], a, b, add, *flags)

    def own(acc: Any, first: int, a: Any, b: Any, add: Any, flags: tuple[int, ...]) -> Any:
        args = (T.address_of(acc[first]), a, b, T.Cast("int32", add))
        return T.cuda.func_call(f"tvmcap_wgmma_s8_n{n}", *args, source_code=_wide_int8(n, name))

    return own if dtype == "int8" and n > 224 else table  # TIRx knows widths up to that


def _wide_int8(n: int, name: str) -> str:
    count = n // 2
    places = ", ".join(f"%{i}" for i in range(count))
    registers = ", ".join(f'"+r"(d[{i}])' for i in range(count))
    return (
        f"__forceinline__ __device__ void tvmcap_wgmma_s8_n{n}(unsigned* d,"
        " unsigned long long a, unsigned long long b, int add)"
        f'{{ asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0;'
        f' {name} {{{places}}}, %{count}, %{count + 1}, p; }}"'
        f' : {registers} : "l"(a), "l"(b), "r"(add)); }}'
    )


def int32(extent: Any) -> Any:
    """Narrow a symbolic extent."""
    return extent if isinstance(extent, int) else tirx.Cast("int32", extent)


def cluster_ids(grid: Any, cluster: int) -> tuple[Any, Any]:
    """Return the cluster's number in the grid and this CTA's rank in it."""
    if cluster == 1:
        return T.cta_id([grid]), 0
    return T.cluster_id([grid]), T.cta_id_in_cluster([cluster])


def launch_params(cluster: int, dependent: bool) -> list[str]:
    """Return a kernel's launch attributes, by CTAs of its cluster."""
    clustered = ["clusterCtaIdx.x"] if cluster > 1 else []
    early = ["tirx.use_programtic_dependent_launch"] if dependent else []
    return ["blockIdx.x", *clustered, "threadIdx.x", *early, "tirx.use_dyn_shared_memory"]


def new_map(buffer: Any, extents: Any, box: Any, item: int, promotion: int = 2) -> Any:
    """Describe a matrix, or a batch of them, to TMA: rows of a box swizzled, zeros past the edge.

    ``extents`` and ``box`` (of one load or store) give columns first; rows follow each other.
    ``promotion``: the L2 cache fetches 64 bytes at once (1), 128 (2) or 256 (3).
    """
    tensor_map = T.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap").ty)
    strides = [extents[0] * item]
    for extent in extents[1:-1]:
        strides.append(strides[-1] * extent)
    ones = [1] * len(extents)
    swizzle = {32: 1, 64: 2, 128: 3}[box[0] * item]
    modes = (0, swizzle, promotion, 0)  # no interleave, swizzle, L2 promotion, zero fill
    dtype = "uint8" if item == 1 else str(buffer.dtype)  # bytes are bytes to TMA
    args = (dtype, len(extents), buffer.data, *extents, *strides, *box, *ones, *modes)
    T.evaluate(T.call_packed("runtime.cuTensorMapEncodeTiled", tensor_map, *args))
    return tensor_map


def load(where: Any, tensor_map: Any, at: Any, barrier: Any, mask: Any = None) -> Any:
    """Load a box through TMA; ``mask`` says which CTAs of the cluster get it."""
    name = _LOAD.format(len(at))
    if mask is None:
        return T.ptx[name](where, T.address_of(tensor_map), *at, barrier)
    name += ".multicast::cluster"
    return T.ptx[name](where, T.address_of(tensor_map), *at, barrier, T.Cast("uint16", mask))


def warm(tensor_map: Any, at: Any) -> Any:
    """Bring a box to the L2 cache; what others still write to it is not missed."""
    return T.ptx[_WARM.format(len(at))](T.address_of(tensor_map), *at)


def store(tensor_map: Any, at: Any, where: Any) -> Any:
    """Store a box through TMA, clipped at the edges."""
    return T.ptx[_STORE.format(len(at))](T.address_of(tensor_map), *at, where)


def cluster_meet() -> Any:
    """Wait for all threads of the cluster; orders no memory but what fences did before."""
    return T.cuda.func_call("tvmcap_cluster_meet", source_code=_CLUSTER_MEET)


def arrive(barrier: Any, rank: Any) -> Any:
    """Arrive at the same barrier of another CTA of the cluster."""
    return T.cuda.func_call("tvmcap_arrive", barrier, rank, source_code=_ARRIVE)


def wait(barrier: Any, parity: Any) -> Any:
    """Wait until the phase of this parity is over."""
    return T.cuda.func_call("tvmcap_wait", barrier, T.Cast("uint32", parity), source_code=_WAIT)


def send(where: Any, barrier: Any, rank: Any, values: Any) -> Any:
    """Write four floats to another CTA's shared memory, and their bytes to its barrier."""
    return T.cuda.func_call("tvmcap_send", where, barrier, rank, *values, source_code=_SEND)


def pack(dtype: str, low: Any, high: Any) -> Any:
    """Round two float32 values to 16 bits, in one register."""
    name, source = _PACK[dtype]
    return T.cuda.func_call(name, low, high, source_code=source, return_type="uint32")
