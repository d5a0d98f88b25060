"""A call of each ATen core operator, by name; inputs are drawn with a fixed seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def samples() -> dict[str, Sample]:
    """Return arguments of every core operator that takes or returns tensors, by bare name.

    Floating-point tensors are float32, away from kinks of the functions.
    """
    made: dict[str, Sample] = {}
    for part in (_elementwise, _binary, _reductions, _shapes, _indexing, _layers, _made):
        made.update(part(_Draw()))
    return made


class _Draw:
    """Draws tensors."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
        """Return uniform numbers between ``low`` and ``high``."""
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        """Return whole numbers from 0 to below ``high``."""
        return torch.randint(high, shape, generator=self.generator)

    def bools(self, *shape: int) -> torch.Tensor:
        """Return truth values."""
        return self.ints(2, *shape).bool()


def _call(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


def _elementwise(t: _Draw) -> dict[str, Sample]:
    domains = {
        "acos": (-0.9, 0.9),
        "acosh": (1.2, 3.0),
        "asin": (-0.9, 0.9),
        "atanh": (-0.9, 0.9),
        "log": (0.2, 3.0),
        "log10": (0.2, 3.0),
        "log1p": (-0.5, 3.0),
        "log2": (0.2, 3.0),
        "reciprocal": (0.4, 3.0),
        "rsqrt": (0.4, 3.0),
        "sqrt": (0.4, 3.0),
        "tan": (-1.2, 1.2),
    }
    names = (
        "abs acos acosh asin asinh atan atanh ceil cos cosh erf exp expm1 floor gelu hardtanh "
        "isinf isnan leaky_relu log log10 log1p log2 neg reciprocal relu round rsqrt sigmoid sign "
        "sin sinh sqrt tan tanh trunc elu alias clone _to_copy"
    ).split()
    found = {}
    for name in names:
        low, high = domains.get(name, (-2.0, 2.0))
        found[f"{name}.default"] = _call(t(5, 7, low=low, high=high))
    found["_to_copy.default"] = _call(t(5, 7), dtype=torch.float64)
    found["bitwise_not.default"] = _call(t.ints(9, 5, 7))
    found["logical_not.default"] = _call(t.bools(5, 7))
    found["clamp.default"] = _call(t(5, 7), -1.0, 1.0)
    found["clamp.Tensor"] = _call(t(5, 7), t(5, 7, low=-1.5, high=-1.0), t(7, low=1.0, high=1.5))
    found["fill.Scalar"] = _call(t(5, 7), 2.0)
    found["full_like.default"] = _call(t(5, 7), 2.0)
    found["copy.default"] = _call(t(5, 7), t(7))
    found["where.self"] = _call(t.bools(5, 7), t(5, 7), t(7))
    return found


def _binary(t: _Draw) -> dict[str, Sample]:
    found = {}
    for name in "eq ne lt le gt ge add sub mul div".split():
        found[f"{name}.Tensor"] = _call(t(5, 7), t(7, low=0.5))
        found[f"{name}.Scalar"] = _call(t(5, 7), 1.5)
    for name in "fmod remainder".split():
        found[f"{name}.Tensor"] = _call(t(5, 7), t(7, low=0.5))
        found[f"{name}.Scalar"] = _call(t(5, 7), 0.7)
    for name in "bitwise_and bitwise_or bitwise_xor".split():
        found[f"{name}.Tensor"] = _call(t.ints(9, 5, 7), t.ints(9, 7))
        found[f"{name}.Scalar"] = _call(t.ints(9, 5, 7), 3)
    for name in "logical_and logical_or logical_xor".split():
        found[f"{name}.default"] = _call(t.bools(5, 7), t.bools(7))
    for name in "atan2 maximum minimum".split():
        found[f"{name}.default"] = _call(t(5, 7), t(7))
    found["atan2.out"] = _call(t(5, 7), t(7), out=t(5, 7))
    found["div.Tensor_mode"] = _call(t(5, 7), t(7, low=0.5), rounding_mode="floor")
    found["div.Scalar_mode"] = _call(t(5, 7), 0.7, rounding_mode="trunc")
    found["pow.Tensor_Tensor"] = _call(t(5, 7, low=0.3), t(7))
    found["pow.Tensor_Scalar"] = _call(t(5, 7), 3)
    found["pow.Scalar"] = _call(1.5, t(5, 7))
    return found


def _reductions(t: _Draw) -> dict[str, Sample]:
    one_each = "amax amin argmax argmin any mean prod"
    found = {f"{name}.default": _call(t(5, 7)) for name in one_each.split()}
    found["any.default"] = _call(t.bools(5, 7))
    found["any.dim"] = _call(t.bools(5, 7), 1)
    found["any.dims"] = _call(t.bools(5, 7), [0, 1])
    found["amax.default"] = _call(t(5, 7), [1])
    found["amin.default"] = _call(t(5, 7), [0], True)
    found["argmax.default"] = _call(t(5, 7), 1)
    found["argmin.default"] = _call(t(5, 7), 0)
    found["max.dim"] = found["min.dim"] = _call(t(5, 7), 1)
    found["mean.dim"] = _call(t(5, 7), [1], True)
    found["sum.dim_IntList"] = _call(t(5, 7), [0])
    found["prod.dim_int"] = _call(t(5, 7), 1)
    found["var.dim"] = _call(t(5, 7), [1])
    found["var.correction"] = _call(t(5, 7), [1], correction=0)
    found["cumsum.default"] = _call(t(5, 7), 1)
    found["sort.default"] = _call(t(5, 7), 1)
    found["topk.default"] = _call(t(5, 7), 3)
    found["_softmax.default"] = found["_log_softmax.default"] = _call(t(5, 7), 1, False)
    found["_cdist_forward.default"] = _call(t(4, 3), t(5, 3), 2.0, None)
    found["_pdist_forward.default"] = _call(t(4, 3))
    return found


def _shapes(t: _Draw) -> dict[str, Sample]:
    x = t(4, 6)
    return {
        "as_strided.default": _call(x, [3, 4], [6, 1], 2),
        "cat.default": _call([x, t(2, 6)], 0),
        "constant_pad_nd.default": _call(x, [1, 2, 0, 1], 0.5),
        "diagonal.default": _call(x, 1),
        "expand.default": _call(t(4, 1), [4, 5]),
        "flip.default": _call(x, [0, 1]),
        "permute.default": _call(t(2, 3, 4), [2, 0, 1]),
        "repeat.default": _call(x, [2, 1]),
        "reflection_pad1d.default": _call(t(2, 3, 5), [1, 2]),
        "reflection_pad2d.default": _call(t(2, 3, 5, 4), [1, 2, 1, 0]),
        "reflection_pad3d.default": _call(t(1, 2, 3, 4, 3), [1, 2, 1, 0, 1, 1]),
        "replication_pad2d.default": _call(t(2, 3, 5, 4), [1, 2, 1, 0]),
        "replication_pad3d.default": _call(t(1, 2, 3, 4, 3), [1, 2, 1, 0, 1, 1]),
        "select.int": _call(x, 1, 2),
        "select_scatter.default": _call(x, t(4), 1, 2),
        "slice.Tensor": _call(x, 1, 1, 6, 2),
        "slice_scatter.default": _call(x, t(4, 2), 1, 2, 4),
        "split_with_sizes.default": _call(x, [2, 4], 1),
        "squeeze.dim": _call(t(4, 1, 3), 1),
        "squeeze.dims": _call(t(4, 1, 1), [1, 2]),
        "unsqueeze.default": _call(x, 1),
        "view.default": _call(x, [3, 8]),
    }


def _indexing(t: _Draw) -> dict[str, Sample]:
    x, index = t(5, 7), t.ints(5, 3)
    places = torch.stack([torch.randperm(5, generator=t.generator)[:3] for _ in range(7)], 1)
    return {
        "embedding.default": _call(t(9, 4), t.ints(9, 2, 3)),
        "embedding_dense_backward.default": _call(t(2, 3, 4), t.ints(9, 2, 3), 9, -1, False),
        "_embedding_bag.default": _call(t(9, 4), t.ints(9, 6), torch.tensor([0, 2, 4])),
        "gather.default": _call(x, 0, places),
        "index.Tensor": _call(x, [index, None]),
        "index_put.default": _call(x, [torch.tensor([0, 2, 4])], t(3, 7)),
        "index_select.default": _call(x, 0, index),
        "masked_scatter.default": _call(x, t.bools(5, 7), t(40)),
        "nonzero.default": _call(x),
        "scatter.value": _call(x, 0, places, 1.5),
        "scatter.src": _call(x, 0, places, t(3, 7)),
        "scatter_add.default": _call(x, 0, places, t(3, 7)),
        "scatter_reduce.two": _call(x, 0, places, t(3, 7), "amax"),
    }


def _layers(t: _Draw) -> dict[str, Sample]:
    image, grad = t(2, 4, 6, 6), t(2, 4, 3, 3)
    kernel, conv = t(6, 4, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    norm = (t(4), t(4, low=0.5))
    layer = t(3, 5, 8)
    mean, scale = layer.mean(-1, keepdim=True), layer.var(-1, keepdim=True).rsqrt()
    groups = image.reshape(2, 2, -1)
    statistics = groups.mean(-1), groups.var(-1).rsqrt()
    pooled, where = torch.ops.aten.max_pool2d_with_indices.default(image, [2, 2])
    return {
        "_adaptive_avg_pool2d.default": _call(image, [3, 3]),
        "_adaptive_avg_pool2d_backward.default": _call(grad, image),
        "_adaptive_avg_pool3d.default": _call(t(1, 2, 4, 4, 4), [2, 2, 2]),
        "_fft_c2r.default": _call(torch.complex(t(4, 5), t(4, 5)), [1], 0, 8),
        "_fft_r2c.default": _call(t(4, 8), [1], 0, True),
        "_native_batch_norm_legit.default": _call(
            image, t(4), t(4), *norm, training=True, momentum=0.1, eps=1e-5
        ),
        "_native_batch_norm_legit.no_stats": _call(image, t(4), t(4), True, 0.1, 1e-5),
        "_native_batch_norm_legit_no_training.default": _call(image, t(4), t(4), *norm, 0.1, 1e-5),
        "adaptive_avg_pool1d.default": _call(t(2, 4, 6), [3]),
        "avg_pool1d.default": _call(t(2, 4, 6), [2]),
        "addmm.default": _call(t(6), t(5, 7), t(7, 6)),
        "avg_pool2d.default": _call(image, [2, 2]),
        "avg_pool2d_backward.default": _call(
            grad, image, [2, 2], [2, 2], [0, 0], False, True, None
        ),
        "avg_pool3d.default": _call(t(1, 2, 4, 4, 4), [2, 2, 2]),
        "bmm.default": _call(t(2, 5, 7), t(2, 7, 3)),
        "col2im.default": _call(t(2, 8, 4), [3, 3], [2, 2], [1, 1], [0, 0], [1, 1]),
        "convolution.default": _call(image, kernel, t(6), *conv),
        "convolution_backward.default": _call(
            t(2, 6, 6, 6), image, kernel, [6], *conv, [True, True, True]
        ),
        "grid_sampler_2d.default": _call(image, t(2, 3, 3, 2, low=-0.9, high=0.9), 0, 0, True),
        "max_pool2d_with_indices.default": _call(image, [2, 2]),
        "max_pool2d_with_indices_backward.default": _call(
            torch.ones_like(pooled), image, [2, 2], [2, 2], [0, 0], [1, 1], False, where
        ),
        "max_pool3d_with_indices.default": _call(t(1, 2, 4, 4, 4), [2, 2, 2]),
        "mm.default": _call(t(5, 7), t(7, 6)),
        "native_dropout.default": _call(t(5, 7), 0.5, True),
        "native_group_norm.default": _call(image, t(4), t(4), 2, 4, 36, 2, 1e-5),
        "native_group_norm_backward.default": _call(
            t(2, 4, 6, 6), image, *statistics, t(4), 2, 4, 36, 2, [True, True, True]
        ),
        "native_layer_norm.default": _call(layer, [8], t(8), t(8), 1e-5),
        "native_layer_norm_backward.default": _call(
            t(3, 5, 8), layer, [8], mean, scale, t(8), t(8), [True, True, True]
        ),
        "upsample_bilinear2d.vec": _call(image, [9, 8], False, None),
        "upsample_nearest2d.vec": _call(image, [9, 8], None),
    }


def _made(t: _Draw) -> dict[str, Sample]:
    x = t(5, 7)
    sizes: dict[str, Callable[..., Sample]] = {name: _call for name in ("rand", "randn")}
    return {
        **{f"{name}.default": call([5, 7]) for name, call in sizes.items()},
        "randperm.default": _call(6),
        "arange.start_step": _call(1, 9, 2),
        "empty.memory_format": _call([5, 7]),
        "empty_strided.default": _call([5, 7], [7, 1]),
        "full.default": _call([5, 7], 1.5),
        "scalar_tensor.default": _call(1.5),
        "_local_scalar_dense.default": _call(torch.tensor(2.0)),
        "sym_size.int": _call(x, 0),
        "sym_numel.default": _call(x),
        "sym_stride.int": _call(x, 0),
        "sym_storage_offset.default": _call(x),
        "sym_is_contiguous.default": _call(x),
        "resize_.default": _call(x, [3, 4]),
    }
