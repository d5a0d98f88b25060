"""Tuning on RPC servers: all at once, some of which stop, crash, lie or were never there."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "kernel"))

import fake_template as fake
import rpc_servers

from tvmcap.base.config import Config
from tvmcap.base.errors import TuneError
from tvmcap.kernel import measure, remote
from tvmcap.kernel.records import RecordStore
from tvmcap.kernel.tracker import Tracker
from tvmcap.tune import tune_module

TARGET = fake.target()
_keys = (f"key{i}" for i in itertools.count())


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc_servers.Farm]:
    with rpc_servers.farm(tmp_path_factory.mktemp("farm")) as made:
        yield made


@pytest.fixture(scope="module")
def pair(farm: rpc_servers.Farm) -> str:
    """The key of two servers that live on."""
    farm.start("left", "right", key="pair")
    return "pair"


@pytest.fixture
def key() -> str:
    return next(_keys)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(remote, "PATIENCE_S", 4.0)
    original = measure.Measurer.__init__

    def quick_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "time_s": 0.02, "workers": 1})

    monkeypatch.setattr(measure.Measurer, "__init__", quick_init)


class Spy:
    """Calls a function at every update with the trials so far."""

    def __init__(self, then: Callable[[int], None]) -> None:
        self.then = then

    def start(self, trials: int) -> None:
        pass

    def update(self, task: str, best: Any, trials: int, *state: Any) -> None:
        self.then(trials)

    def finish(self) -> None:
        pass


def run(
    farm: rpc_servers.Farm,
    key: str,
    folder: Path,
    trials: int,
    find: Any = fake.find,
    then: Callable[[int], None] = lambda trials: None,
    rows: Sequence[int] = (3, 16),
) -> Any:
    config = Config(log_dir=str(folder), tune=trials, rpc=farm.address, key=key)
    return tune_module(fake.module(), TARGET, config, Spy(then), find=find, sizes={"B": rows})


def test_a_server_that_stops_in_mid_run_loses_nothing(
    farm: rpc_servers.Farm, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    farm.start("one", "two", key=key)
    stopped: list[int] = []

    def stop(trials: int) -> None:
        # it has had the unscheduled kernel and at most two of four candidates
        if not stopped and farm.loads("one") in (2, 3):
            stopped.append(trials)
            farm.kill("one")

    result = run(farm, key, tmp_path, 10, then=stop)
    assert stopped and farm.loads("two") >= 2
    assert result.trials == 10 and not result.failures and result.stopped != "no server"
    assert "went away" in caplog.text
    records = RecordStore(tmp_path).records
    measured = Counter((r.candidate, str(r.sizes)) for r in records)
    assert len(measured) == 10 and all(r.median_us and r.error is None for r in records)
    assert all(r.target["kind"] == "llvm" and r.target["name"] is None for r in records)


def test_failures_have_the_causes_of_a_local_run_and_servers_survive(
    farm: rpc_servers.Farm, pair: str, tmp_path: Path
) -> None:
    result = run(farm, pair, tmp_path, 14, fake.find_failing)
    expected = ("wrong result", "build crash", "lower", "compile", "run crash")
    assert result.failures == dict.fromkeys(expected, 2) and result.trials == 14
    assert len(Tracker("127.0.0.1", farm.port, pair).check()) == 2


def test_of_tvms_own_servers_a_crash_costs_one(
    farm: rpc_servers.Farm, key: str, tmp_path: Path
) -> None:
    farm.start("one", "two", key=key, stock=True)
    result = run(farm, key, tmp_path, 9, fake.find_crash, rows=[3])
    assert result.failures == {"run crash": 1} and result.trials == 4
    assert result.stopped == "exhausted"
    assert len(Tracker("127.0.0.1", farm.port, key).check()) == 1


def test_the_last_server_gone_ends_the_run_and_keeps_what_was_found(
    farm: rpc_servers.Farm, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    farm.start("one", key=key)
    result = run(
        farm, key, tmp_path, 10, then=lambda trials: farm.kill("one") if trials == 3 else None
    )
    assert result.stopped == "no server" and result.trials == 3 and not result.failures
    assert "no server is left" in caplog.text and "went away" in caplog.text
    assert len(RecordStore(tmp_path).records) == 3


@pytest.fixture(scope="module")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that computes twice what it should."""
    from tvmcap.kernel import tasks, worker

    task = tasks.extract(fake.module(), TARGET, fake.find)[0]
    func = fake.lower(task.func, None, fake.Knobs(4, fake.WRONG), TARGET)
    path = str(tmp_path_factory.mktemp("wrong") / "doubled.so")
    worker.compile_to(func, TARGET, path)
    return path


@pytest.mark.parametrize("first", [0, 2])
def test_a_server_that_lies_is_left_out(
    farm: rpc_servers.Farm,
    key: str,
    doubled: str,
    first: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It computes twice what it should, at once or from its third library on."""
    farm.start("honest", key=key)
    farm.start("liar", key=key, before=rpc_servers.LIES.format(wrong=doubled, first=first))
    with caplog.at_level(logging.WARNING):
        result = run(farm, key, tmp_path, 8)
    assert result.trials == 8 and not result.failures
    assert "is left out: it computes the unscheduled kernel wrong" in caplog.text


def test_lying_servers_alone_are_an_error(
    farm: rpc_servers.Farm, key: str, doubled: str, tmp_path: Path
) -> None:
    farm.start("liar", key=key, before=rpc_servers.LIES.format(wrong=doubled, first=0))
    with pytest.raises(TuneError, match="computes the unscheduled kernel wrong"):
        run(farm, key, tmp_path, 4)
    assert not RecordStore(tmp_path).records


def test_an_unknown_key_is_an_error_that_names_the_known(
    farm: rpc_servers.Farm, pair: str, tmp_path: Path
) -> None:
    with pytest.raises(TuneError, match=r"under the key 'other'.*'pair' \(2\)"):
        run(farm, "other", tmp_path, 4)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("went on")

    monkeypatch.setattr("tvmcap.capture.export.capture", fail)
    monkeypatch.setattr(measure.Measurer, "__init__", fail)


def test_no_tracker_is_an_error_before_anything_is_built(never: None, tmp_path: Path) -> None:
    import tvmcap

    where = f"127.0.0.1:{rpc_servers.free_port()}"
    with pytest.raises(TuneError, match=f"no RPC tracker answers at {where}"):
        tvmcap.tune(abs, (1,), target="llvm", log_dir=tmp_path, rpc=where, key="x")


def test_something_else_than_a_tracker_is_an_error(never: None, tmp_path: Path) -> None:
    import tvmcap

    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        threading.Thread(target=answer, daemon=True).start()
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TuneError, match="another protocol"):
            tvmcap.tune(abs, (1,), target="llvm", log_dir=tmp_path, rpc=where, key="x")


def test_the_command_line_tunes_on_servers(
    farm: rpc_servers.Farm, pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    from tvmcap.cli import main

    before = [farm.loads(name) for name in ("left", "right")]
    (tmp_path / "model.py").write_text(
        "import torch\n\n\ndef block(x, w):\n    return torch.relu(x @ w)\n"
    )
    line = ["tune", f"{tmp_path}/model.py:block", "--input", "x:float32[8,32]", "--trials", "3"]
    line += ["--input", "w:float32[32,48]", "--target", "llvm", "--log-dir", str(tmp_path)]
    remote_options = ["--rpc", farm.address, "--key", pair, "--workers", "2"]
    assert main([*line, "--json", *remote_options]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == 3
    assert all(farm.loads(n) > old for n, old in zip(("left", "right"), before, strict=True))
    assert main([*line, *remote_options[:2]]) == 2
    assert "key is missing" in capsys.readouterr().err


def test_candidates_for_a_gpu_are_compiled_without_one(tmp_path: Path) -> None:
    import tvm

    from tvmcap.base.codegen import make_target
    from tvmcap.kernel import process, tasks

    target = make_target("cuda:sm_90a")
    task = tasks.extract(fake.module(rows=8), TARGET, fake.find)[0]
    path = tmp_path / "kernel.so"
    request = {"op": "build_plain", "func": tvm.ir.save_json(task.func), "path": str(path)}
    command = process.command("cuda", builds=True)
    worker = process.Worker(command, process.environment(target), tmp_path)
    try:
        reply = worker.call({**request, "target": process.target_json(target)}, 120)
    finally:
        worker.stop()
    assert reply == {} and b".nv.info.main" in path.read_bytes()


def test_the_server_refuses_what_is_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    from tvmcap import rpc_server

    for options in (["--tracker", "here", "--key", "a"], ["--tracker", "here:1", "--key", "a b"]):
        with pytest.raises(SystemExit):
            rpc_server.main(options)
        assert "expected" in capsys.readouterr().err


def test_a_server_starts_nothing_of_cuda_before_its_sessions(farm: rpc_servers.Farm) -> None:
    """They are forks of it, which CUDA would not survive."""
    arguments = ["--tracker", farm.address, "--key", "fork", "--host", "127.0.0.1"]
    code = (
        "import os, torch\n"
        "for name in ('is_available', 'device_count', 'init', '_lazy_init'):\n"
        "    setattr(torch.cuda, name, lambda *_: os._exit(7))\n"
        f"from tvmcap import rpc_server\nrpc_server.main({arguments!r})\n"
    )
    server = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        found = Tracker("127.0.0.1", farm.port, "fork")
        rpc_servers.wait(lambda: server.poll() is not None or bool(found.check()))
        assert server.poll() is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.gpu
def test_a_gpu_is_measured_through_its_server(farm: rpc_servers.Farm, tmp_path: Path) -> None:
    import torch

    import tvmcap

    # a process of its own, that has torch and with it what TVM needs for CUDA
    command = [sys.executable, "-m", "tvmcap.rpc_server", "--tracker", farm.address, "--key", "gpu"]
    server = subprocess.Popen([*command, "--host", "127.0.0.1"], start_new_session=True)
    try:
        rpc_servers.wait(lambda: bool(Tracker("127.0.0.1", farm.port, "gpu").check()))
        args = (torch.randn(64, 128), torch.randn(128, 256))
        options = dict(target="cuda", rpc=farm.address, key="gpu", log_dir=str(tmp_path), trials=4)
        result = tvmcap.tune(torch.matmul, args, **options)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert result.trials == 4 and "wrong result" not in result.failures
    records = RecordStore(tmp_path).records
    assert any(r.median_us for r in records)
    assert all(r.target["name"] == torch.cuda.get_device_name() for r in records)
