"""Processes that fork: on a CPU the child may call, on a GPU it is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tvmcap
from tests.runtime.conftest import three_layers
from tests.runtime.test_loader import CALL, WITHOUT, run
from tvmcap.base.errors import LibraryError
from tvmcap.runtime.threads import Contexts

Layers = Callable[[int | None], Path]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_a_forked_child_can_call(chain: Path) -> None:
    code = (
        CALL
        + """
execute = Executor(sys.argv[1])
execute(x, w)
child = os.fork()
if child == 0:
    np.testing.assert_allclose(execute(x, w), x @ w @ w, rtol=1e-5)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
np.testing.assert_allclose(execute(x, w), x @ w @ w, rtol=1e-5)
"""
    )
    run(WITHOUT + code, chain, TVM_NUM_THREADS="2")


def test_a_child_forked_before_the_first_call_has_a_pool_and_ends(chain: Path) -> None:
    code = (
        CALL.rpartition("np.testing")[0]
        + """
import signal
from tvmcap.runtime.loader import configure_threads
execute = Executor(sys.argv[1])
child = os.fork()
if child == 0:
    signal.alarm(60)
    np.testing.assert_allclose(execute(x, w), x @ w @ w, rtol=1e-5)
    assert configure_threads() == 2
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
np.testing.assert_allclose(execute(x, w), x @ w @ w, rtol=1e-5)
"""
    )
    run(code, chain, TVM_NUM_THREADS="2")


def test_a_fork_is_refused_where_the_device_does_not_survive_it(
    layers: Layers, w: torch.Tensor
) -> None:
    from tvmcap.runtime import threads

    lib, x = tvmcap.load(layers(64)), torch.rand(3, 8)
    threads._on_gpu.add(lib.executor._contexts)  # as a library on a GPU is
    lib(x, w)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            for args in ((x, w), (x,), (x, "w")):  # refused whatever comes
                with pytest.raises(LibraryError, match="'spawn'"):
                    lib(*args)
            assert not threads._on_gpu  # nothing is freed where CUDA is not
            os.write(write, b"refused")
        except BaseException as e:
            os.write(write, f"{type(e).__name__}: {e}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    said = os.read(read, 1000).decode()
    os.close(read)
    assert said == "refused"
    torch.testing.assert_close(lib(x, w), three_layers(x, w))
    assert isinstance(lib.executor._contexts, Contexts)
