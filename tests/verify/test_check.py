"""verify passes what eager itself would pass and says where anything else goes wrong."""

import pytest
import torch

from tests.verify.fakes import FakeCompiled, block, block_case, signature
from tvmcap.base.errors import VerifyError
from tvmcap.base.numerics import Comparison
from tvmcap.verify.again import pool
from tvmcap.verify.check import Subject, check_set, example_leaves, verify
from tvmcap.verify.inputs import InputSet
from tvmcap.verify.reference import run_eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_order_of_summation_passes_at_every_size(dtype):
    args, sig = block_case(dtype=dtype)

    def ours(x, w, b):
        acc = x.float()[:, ::2] @ w.float()[::2] + x.float()[:, 1::2] @ w.float()[1::2]
        return torch.nn.functional.gelu(acc + b.float(), approximate="tanh").to(dtype)

    report = verify(FakeCompiled(ours, block, args, sig), level="full")
    assert report.ok, report
    assert {c.sizes["B"] for c in report.checks} >= {1, 2, 8, 127, 128, 129, 512}
    assert {c.kind for c in report.checks} == {"normal", "large", "zeros", "nonfinite"}
    assert report.reference == ("float64" if dtype == torch.float32 else "float32")
    assert report.require() is report and report.to_json()["ok"] is True


def test_a_tail_that_is_wrong_at_some_sizes_is_named():
    args, sig = block_case()

    def ours(x, w, b):
        y = block(x, w, b)
        if len(y) % 8:
            y[-1, 5] += 1e-3
        return y

    report = verify(FakeCompiled(ours, block, args, sig))
    failed = {c.sizes["B"] for c in report.checks if not c.ok}
    assert failed == {1, 2, 13, 127, 129}
    with pytest.raises(VerifyError) as e:
        report.require()
    text = str(e.value)
    for part in ("B=1", "out0", "[0, 5]", "eager", "bisect", "disable=", "float64"):
        assert part in text


def test_a_low_precision_accumulator_fails():
    args, sig = block_case(k=512)

    def ours(x, w, b):
        return block(x.bfloat16(), w.bfloat16(), b.bfloat16()).float()

    assert not verify(FakeCompiled(ours, block, args, sig)).ok


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_within_its_own_budget_alone(allowed):
    args, sig = block_case(k=512)

    def ours(x, w, b):
        return run_eager(block, (x.flip(1), w.flip(0), b), {}, tf32=True)

    lib = FakeCompiled(ours, block, args, sig)
    cpu = torch.device("cpu")
    subject = Subject(sig, lib, block, cpu, cpu, example_leaves(lib.captured), tf32=allowed)
    for seed in range(3):
        assert check_set(subject, InputSet("normal", {"B": 64}, seed)).ok == allowed

    def worse(x, w, b):
        return run_eager(block, (x.bfloat16().float(), w, b), {}, tf32=True)

    subject = Subject(
        sig, FakeCompiled(worse, block, args, sig), *(block, cpu, cpu), None, tf32=True
    )
    assert not check_set(subject, InputSet("normal", {"B": 64}, 0)).ok


def test_a_nan_that_is_lost_fails():
    args, sig = block_case()

    def ours(x, w, b):
        return block(x, w, b).nan_to_num(0.0)

    report = verify(FakeCompiled(ours, block, args, sig), level="full")
    assert [c.kind for c in report.checks if not c.ok] == ["nonfinite"]
    assert report.checks[3].outputs[0].misplaced > 0


def test_sizes_seed_limit_and_progress():
    args, sig = block_case()
    seen = []
    lib = FakeCompiled(block, block, args, sig)
    report = verify(
        lib, sizes=[{"B": 3}, {"B": 5}], progress=lambda i, n, s: seen.append((i, n, s))
    )
    assert [c.sizes["B"] for c in report.checks] == [3, 3, 3, 5]
    assert seen[0] == (0, 4, "normal B=3")
    limited = verify(lib, limit_s=0.0)
    assert len(limited.checks) == 3 and limited.left_out > 0 and limited.ok
    inputs = []
    for seed in (1, 1, 2):
        verify(
            FakeCompiled(lambda x, w, b: inputs.append(x) or block(x, w, b), block, args, sig),
            seed=seed,
            limit_s=0,
        )
    assert torch.equal(inputs[0], inputs[3]) and not torch.equal(inputs[0], inputs[6])


def test_a_loaded_library_needs_a_reference_and_takes_one():
    args, sig = block_case()
    lib = FakeCompiled(block, block, args, sig, loaded=True)
    with pytest.raises(VerifyError, match="reference=fn"):
        verify(lib)
    assert verify(lib, reference=block).ok
    assert not verify(lib, reference=lambda x, w, b: block(x, w, b) * 1.001).ok
    with pytest.raises(VerifyError, match="another machine"):
        verify(FakeCompiled(block, block, args, sig, executor=False))


def test_inputs_that_eager_refuses_are_skipped_and_all_skipped_is_no_pass():
    args, sig = block_case()

    def even_only(x, w, b):
        if len(x) % 2:
            raise ValueError("odd batch")
        return block(x, w, b)

    report = verify(FakeCompiled(even_only, even_only, args, sig))
    assert report.ok and {c.sizes["B"] for c in report.checks if c.skipped} == {1, 13, 127, 129}
    report = verify(FakeCompiled(even_only, even_only, args, sig), sizes=[{"B": 3}])
    with pytest.raises(VerifyError, match="odd batch"):
        report.require()


def test_integers_bools_and_several_outputs():
    ids = torch.randint(0, 100, (4, 6))
    mask = torch.rand(4, 6) < 0.5
    table = torch.randn(100, 8)
    sig = signature(
        {"ids": ("int64", ("B", 6)), "mask": ("bool", ("B", 6))},
        [("float32", ("B", 6, 8)), ("int64", ("B",))],
        [("B", 0, None)],
    )

    def fn(ids, mask):
        return table[ids] * mask[..., None], ids.amax(1)

    assert verify(FakeCompiled(fn, fn, (ids, mask), sig)).ok
    report = verify(FakeCompiled(lambda i, m: (fn(i, m)[0], i.amin(1)), fn, (ids, mask), sig))
    assert not report.ok and report.checks[0].outputs[0].ok and not report.checks[0].outputs[1].ok


def test_draws_are_pooled_by_their_largest_errors():
    a = Comparison("y", "float32", (4,), max_abs=3.0, got=3.0, eager_abs=1.0, budget=2.0, bad=1)
    b = Comparison("y", "float32", (4,), max_abs=1.0, got=1.0, eager_abs=2.0, budget=4.0)
    assert pool(a, b).ok and pool(a, b).eager_abs == 2.0
    assert not pool(a, a).ok


def test_weights_are_drawn_once_and_activations_for_every_set():
    args, sig = block_case()
    seen = []
    lib = FakeCompiled(lambda x, w, b: seen.append((x, w)) or block(x, w, b), block, args, sig)
    assert verify(lib).ok
    normal = [pair for pair, n in zip(seen, range(len(seen)), strict=True) if n not in (1, 2)]
    assert all(w is normal[0][1] for _, w in normal)
    assert len({float(x.flatten()[0]) for x, _ in normal}) == len(normal)


def test_code_that_writes_to_its_arguments_is_refused():
    args, sig = block_case()
    lib = FakeCompiled(block, lambda x, w, b: block(x.mul_(2), w, b), args, sig)
    with pytest.raises(VerifyError, match="writes to its arguments"):
        verify(lib)
