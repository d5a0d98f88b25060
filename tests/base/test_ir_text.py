"""TVM's objects survive being written as text."""

import numpy as np
import tvm
from tvm import relax

from tvmcap.base import ir_text


def test_a_function_and_its_constants_are_as_they_were() -> None:
    values = np.random.default_rng().standard_normal((3, 5), dtype=np.float32)
    x = relax.Var("x", relax.TensorType([3, 5], "float32"))
    block = relax.BlockBuilder()
    with block.function("main", [x]):
        with block.dataflow():
            added = block.emit_output(relax.op.add(x, relax.const(values)))
        block.emit_func_output(added)
    mod = relax.transform.LegalizeOps()(block.get())
    text = tvm.ir.save_json(mod)
    found = ir_text.parse(text)
    tvm.ir.assert_structural_equal(found, mod)
    tvm.ir.assert_structural_equal(found, tvm.ir.load_json(text))
    constants: list[tvm.ir.GenericConst] = []

    def visit(node: object) -> None:
        if isinstance(node, tvm.ir.GenericConst):
            constants.append(node)

    relax.analysis.post_order_visit(found["main"], visit)
    (read,) = constants
    np.testing.assert_array_equal(read.value.numpy(), values)
