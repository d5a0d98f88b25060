"""Contract checks: each pass's promise, broken on purpose."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.planned import TARGET, fused, mlp
from tvmcap import contracts
from tvmcap.base.errors import BuildError, ContractError
from tvmcap.kernel import apply
from tvmcap.library.plan import plan


@I.ir_module
class Operators:
    @R.function
    def main(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        with R.dataflow():
            y: R.Tensor((2,), "float32") = R.exp(x)
            R.output(y)
        return y


def unbound():
    loose = relax.Var("loose", relax.TensorType((2,), "float32"))
    main = Operators["main"]
    (block,) = main.body.blocks
    (binding,) = block.bindings
    other = relax.VarBinding(binding.var, relax.op.exp(loose))
    body = relax.SeqExpr([relax.DataflowBlock([other])], main.body.body)
    return tvm.IRModule({"main": relax.Function(main.params, body, main.ret_ty, True, main.attrs)})


@pytest.fixture(scope="module")
def stages():
    """A module after each stage."""
    raw = fused(mlp((8, 8, 8), rows=4))
    scheduled = apply.schedule(raw, TARGET, lambda task: [], [])
    return {"fuse": raw, "schedule": scheduled, "plan": plan(scheduled)}


def test_what_the_passes_leave_is_accepted(stages) -> None:
    for name, mod in stages.items():
        contracts.check(mod, name)
    contracts.check(Operators, "canonicalize")


def test_ill_formed() -> None:
    with pytest.raises(
        ContractError, match="after pass 'canonicalize' is not well-formed"
    ) as caught:
        contracts.check(unbound(), "canonicalize")
    assert caught.value.__cause__ is not None and isinstance(caught.value, BuildError)


@pytest.mark.parametrize("name", ["legalize", "fuse", "schedule"])
def test_operators_left_in_main(name) -> None:
    with pytest.raises(ContractError, match=rf"after pass '{name}' main still calls .*exp"):
        contracts.check(Operators, name)


def test_a_kernel_without_a_schedule(stages) -> None:
    with pytest.raises(ContractError, match="not scheduled"):
        contracts.check(stages["fuse"], "schedule")


def test_allocations_without_a_plan(stages) -> None:
    with pytest.raises(ContractError, match="without a plan"):
        contracts.check(stages["schedule"], "plan")
