"""Runners on RPC servers: who is blamed for what, without any server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tvmcap.kernel import remote, remote_worker
from tvmcap.kernel.tracker import NoServerError, Tracker

NOTHING = {"name": None, "units": None, "memory_gib": None}
RUN = {"op": "run", "device": "cpu", "outputs": "a"}


class Script:
    """Replies to requests in turn; ``asked`` holds the servers that each preparation refused."""

    def __init__(self, *replies: dict[str, Any]) -> None:
        self.replies, self.asked = [*replies], list[Any]()

    def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if request["op"] == "prepare":
            self.asked.append(request["refused"])
        return self.replies.pop(0)


def ready(port: int, **machine: Any) -> dict[str, Any]:
    return {"server": ["host", port], "machine": {**NOTHING, **machine}}


def failed(cause: str, message: str = "why") -> dict[str, Any]:
    return {"error": {"cause": cause, "message": message}}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function of the replies of a runner's process, and of the servers that stand."""

    def make(*replies: dict[str, Any], standing: tuple[int, ...] = ()) -> Any:
        monkeypatch.setattr(remote, "_SETTLE_S", 0.0)
        monkeypatch.setattr(remote, "reachable", lambda address: address[1] in standing)
        servers = remote.Servers(Tracker("host", 1, "key"), 1, 1, 0.0)
        return remote.RemoteRunner(Script(*replies), "cpu", 0.0, 1.0, servers)  # type: ignore[arg-type]

    return make


def test_a_session_given_back_in_between_is_opened_again(runner: Any) -> None:
    made = runner(ready(1), {"released": True}, ready(2), {"us": [1.0]})
    assert made._call(RUN, 1.0) == {"us": [1.0]}
    assert not made.servers.lost and not made.servers.refused


def test_a_candidate_is_blamed_where_its_server_stands(runner: Any) -> None:
    made = runner(ready(1), failed("server lost"), standing=(1,))
    assert made._call(RUN, 1.0) == failed("run crash")
    made = runner(ready(1), failed("run timeout"), standing=(1,))
    assert made._call(RUN, 1.0) == failed("run timeout")


def test_a_candidate_goes_to_another_server_where_its_own_is_gone(runner: Any) -> None:
    for cause in ("server lost", "run timeout"):
        made = runner(ready(1), failed(cause), ready(2), {"us": []})
        assert made._call(RUN, 1.0) == {"us": []}
        assert made.servers.lost == [("host", 1)]


def test_what_takes_two_servers_along_is_to_blame(runner: Any) -> None:
    made = runner(ready(1), failed("server lost"), ready(2), failed("server lost"))
    assert made._call(RUN, 1.0) == failed("run crash")
    assert made.servers.lost == [("host", 1), ("host", 2)]


def test_any_number_of_servers_may_lie(runner: Any) -> None:
    replies = [r for port in (1, 2, 3) for r in (ready(port), failed("server", "wrong"))]
    made = runner(*replies, ready(4), {"us": [2.0]})
    assert made._call(RUN, 1.0) == {"us": [2.0]}
    assert made.worker.asked[-1] == [("host", 1), ("host", 2), ("host", 3)]


def test_servers_of_a_key_have_the_same_card(runner: Any) -> None:
    made = runner(ready(1, name="A", units=3), {}, ready(2, name="B", units=3), ready(1, name="A"))
    made._call(RUN, 1.0)
    with pytest.raises(IndexError):  # the script ends: number 1 has other units now
        made._call(RUN, 1.0)
    assert "it has a B, and others a A" in made.servers.refused["host", 2]
    assert made.worker.asked[2] == [("host", 2)]


def test_no_server_left_says_what_became_of_them(runner: Any) -> None:
    made = runner(
        *(ready(1), failed("server", "it lies"), ready(2), failed("server lost")),
        failed("no server", "none is left"),
    )
    with pytest.raises(NoServerError) as error:
        made._call(RUN, 1.0)
    assert str(error.value).splitlines() == [
        "none is left",
        "host:1 was left out: it lies",
        "host:2 went away",
    ]
    made = runner(failed("prepare timeout", "killed after 300 s"))
    with pytest.raises(NoServerError, match="no server under 'key' was free: killed after 300 s"):
        made._call(RUN, 1.0)


def test_a_session_is_kept_while_it_lasts_and_its_server_is_trusted() -> None:
    opened: list[Any] = []

    class Servers:
        def open(self, refused: Any, session_s: float, patience_s: float) -> Any:
            opened.append(refused)
            remote = SimpleNamespace(
                device=lambda name, index: SimpleNamespace(exist=True),
                get_function=lambda name: lambda *args: None,
            )
            return remote, ("host", len(opened))

    client = remote_worker.Client(Servers())  # type: ignore[arg-type]
    request = {"device": "cpu", "outputs": "", "threads": 1, "need_s": 1.0, "patience_s": 0.0}

    def server(**changes: Any) -> int:
        reply = client.prepare({**request, "refused": [], **changes})
        return int(reply["server"][1])

    assert [server(), server()] == [1, 1]
    assert server(need_s=1e6) == 2
    assert [server(refused=[["host", 1]]), server(refused=[["host", 2]])] == [2, 3]
    assert opened[-1] == {("host", 2)}
    client.release()
    assert client.run({"outputs": ""}) == {"released": True}
    assert server() == 4
