"""The server, as the real client and Prometheus see it."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import torch
import tritonclient.http as triton

from tests.serving import WIDTH, Net, serving_client, write_sample
from tvmcap.cli import main


def client(url, **options):
    return triton.InferenceServerClient(urlsplit(url).netloc, **options)


def inputs(x, binary=True):
    given = triton.InferInput("x", list(x.shape), "FP32")
    given.set_data_from_numpy(x, binary_data=binary)
    return [given]


def draw(rows):
    return np.random.default_rng().standard_normal((rows, WIDTH), dtype=np.float32)


NETS = [Net(seed).eval() for seed in range(2)]  # once: threads share torch's seed


def expected(x, seed=0):
    with torch.no_grad():
        return NETS[seed](torch.from_numpy(x)).numpy()


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def get(url):
    """Status and body, whatever the status."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()


def test_health_and_metadata(url):
    with client(url) as c:
        assert c.is_server_live() and c.is_server_ready() and c.is_model_ready("net")
        assert c.is_model_ready("net", "1") and not c.is_model_ready("net", "2")
        assert not c.is_model_ready("other")
        assert c.get_server_metadata()["extensions"] == ["binary_tensor_data", "model_repository"]
        told = c.get_model_metadata("net")
        assert told["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, WIDTH]}]
        assert told["outputs"] == [{"name": "out0", "datatype": "FP32", "shape": [-1, WIDTH]}]
        index = [{"name": "net", "version": "1", "state": "READY", "reason": ""}]
        assert c.get_model_repository_index() == index


@pytest.mark.parametrize("sends_binary", [True, False])
@pytest.mark.parametrize("wants_binary", [True, False])
def test_inference_in_binary_and_json(url, sends_binary, wants_binary):
    x = draw(3)
    with client(url) as c:
        asked = [triton.InferRequestedOutput("out0", binary_data=wants_binary)]
        result = c.infer("net", inputs(x, sends_binary), outputs=asked, request_id="abc")
        close(result.as_numpy("out0"), expected(x))
        told = result.get_response()
        assert (told["id"], told["model_name"], told["model_version"]) == ("abc", "net", "1")
        close(c.infer("net", inputs(x), model_version="1").as_numpy("out0"), expected(x))


def test_clients_at_once_get_their_own_rows_from_shared_batches(url):
    before = serving_client.metrics(url)

    def ask(seed):
        rng = np.random.default_rng(seed)
        with client(url) as c:
            for _ in range(5):
                x = rng.standard_normal((rng.integers(1, 4), WIDTH), dtype=np.float32)
                close(c.infer("net", inputs(x)).as_numpy("out0"), expected(x))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(16)))
    after = serving_client.metrics(url)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['tvmcap_requests_total{status="200"}'] == 80
    assert grown["tvmcap_batch_rows_count"] < 80
    assert grown["tvmcap_request_seconds_count"] == grown["tvmcap_queue_seconds_count"] == 80
    assert after["tvmcap_waiting_requests"] == 0


def test_the_client_sees_what_was_wrong(url):
    with client(url) as c:
        for x, words in ((draw(3)[:, :15], "expected size 16"), (draw(513), "at most 512")):
            with pytest.raises(triton.InferenceServerException, match=words) as caught:
                c.infer("net", inputs(x))
            assert caught.value.status() == "400"
        with pytest.raises(triton.InferenceServerException, match="there is 'net'"):
            c.infer("other", inputs(draw(1)))
        with pytest.raises(triton.InferenceServerException, match="start with --sample"):
            c.load_model("net")
    base = f"http://{urlsplit(url).netloc}"
    assert get(f"{base}/nowhere") == (404, b'{"error": "Not Found"}')
    assert get(f"{url}/infer")[0] == 405


def test_a_swap_under_load_and_bad_ones_that_are_refused(net, successor, stranger, tmp_path):
    path, sample = tmp_path / "net.so", write_sample(tmp_path / "sample.npz", 0)
    shutil.copyfile(net, path)
    x = draw(2)
    old, new = expected(x), expected(x, seed=1)
    with serving_client.running(path, "--sample", str(sample)) as (url, _), client(url) as c:
        done, answers = threading.Event(), []

        def ask():
            with client(url) as mine:
                while not done.is_set():
                    answers.append(mine.infer("net", inputs(x)).as_numpy("out0"))

        bad = {
            "no tvmcap manifest": lambda: path.write_bytes(net.read_bytes()[:9000]),
            "inputs differ": lambda: shutil.copyfile(stranger, path),
            "out0 differs": lambda: shutil.copyfile(successor, path),
        }
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask) for _ in range(4)]
            try:
                for words, spoil in bad.items():
                    spoil()
                    with pytest.raises(triton.InferenceServerException, match=words) as caught:
                        c.load_model("net")
                    assert caught.value.status() == "422"
                    close(c.infer("net", inputs(x)).as_numpy("out0"), old)
                write_sample(sample, 1)
                c.load_model("net")
                close(c.infer("net", inputs(x)).as_numpy("out0"), new)
            finally:
                done.set()
            for one in asking:
                one.result()  # no request failed
        assert all(
            np.allclose(a, old, atol=1e-4) or np.allclose(a, new, atol=1e-4) for a in answers
        )
        assert np.allclose(answers[0], old, atol=1e-4)
        figures = serving_client.metrics(url)
        assert figures['tvmcap_swaps_total{outcome="refused"}'] == 3
        assert figures['tvmcap_swaps_total{outcome="done"}'] == 1
        assert len([name for name in figures if name.startswith("tvmcap_library{")]) == 1
        with pytest.raises(triton.InferenceServerException, match="expected none"):
            c.load_model("net", config=json.dumps({"a": 1}))


def post(url, x):
    """Send one request; return the status, headers and rows of the answer."""
    import http.client

    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=20)
    head, _, body = serving_client.infer_request(url, x).partition(b"\r\n\r\n")
    length = head.decode().rpartition(f"{serving_client.LENGTH}: ")[2]
    connection.request("POST", f"{where.path}/infer", body, {serving_client.LENGTH: length})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    rows = (
        np.frombuffer(data[-x.nbytes :], np.float32).reshape(x.shape) if answer.status == 200 else 0
    )
    return answer.status, answer.headers, rows


def test_a_full_queue_and_a_graceful_end(net):
    options = ["--max-queue", "3", "--max-delay-ms", "2500"]
    xs = [draw(1) for _ in range(8)]
    with serving_client.running(net, *options) as (url, process), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda x: post(url, x), xs))
        refused = [headers for status, headers, _ in answers if status == 429]
        assert len(refused) == 5 and all(int(h["Retry-After"]) >= 1 for h in refused)
        asked = [pool.submit(post, url, x) for x in xs[:3]]
        while serving_client.metrics(url)["tvmcap_waiting_requests"] < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        for x, answer in zip(xs, asked, strict=False):
            status, _, rows = answer.result()
            assert status == 200
            close(rows, expected(x))
        assert process.wait(20) == 0
        with pytest.raises(OSError, match=r"refused|reset"):
            post(url, xs[0])


def test_what_waits_longer_than_the_end_takes_gets_503(net):
    options = ["--max-delay-ms", "60000", "--drain-s", "0"]
    with serving_client.running(net, *options) as (url, process), ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(post, url, draw(1)) for _ in range(2)]
        while serving_client.metrics(url)["tvmcap_waiting_requests"] < 2:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert [answer.result()[0] for answer in asked] == [503, 503]
        assert process.wait(20) == 0


def test_it_listens_to_this_machine_alone_and_tells_what_it_cannot_do(
    served, net, tmp_path, capsys
):
    url, process = served
    listening = [c for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"]
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
    (tmp_path / "bad.so").write_bytes(net.read_bytes()[:9000])
    for options, status, words in (
        ([str(net), "--port", str(urlsplit(url).port)], 2, "cannot listen at 127.0.0.1"),
        ([str(net), "--port", "0", "--max-batch", "0"], 2, "max_batch: expected more than 0"),
        ([str(tmp_path / "bad.so"), "--port", "0"], 1, "no tvmcap manifest"),
        ([str(net), "--port", "0", "--sample", str(tmp_path / "no.npz")], 2, "no such file"),
    ):
        assert main(["serve", *options]) == status
        told = capsys.readouterr()
        assert words in told.err and "Traceback" not in told.err and not told.out


def test_collections_skip_what_was_loaded(net, monkeypatch, capsys):
    def run(path, options, *, started, **_):
        started("http://127.0.0.1:1")

    monkeypatch.setattr("tvmcap.runtime.serve.serve", run)
    before = gc.get_freeze_count()
    try:
        assert main(["serve", str(net)]) == 0
        assert gc.get_freeze_count() > before + 10_000
    finally:
        gc.unfreeze()
    assert capsys.readouterr().out.startswith("serving net at http://127.0.0.1:1")


def test_many_connections_that_stay_busy(url):
    xs = [draw(1) for _ in range(64)]
    requests = [serving_client.infer_request(url, x) for x in xs]
    clients = asyncio.run(serving_client.load(url, requests, 1.0))
    assert not [answer for c in clients for answer in c.failed]
    for x, c in zip(xs, clients, strict=True):
        assert c.seconds
        close(np.frombuffer(c.last[-x.nbytes :], np.float32).reshape(x.shape), expected(x))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("early", [False, True])
def test_both_signals_end_it_in_good_order(net, number, early):
    """Also where they come after the library is loaded and before uvicorn listens to them."""
    code = f"""
import os, signal, sys, uvicorn
from tvmcap.cli import main
run = uvicorn.Server.run
def early(self, sockets=None):
    os.kill(os.getpid(), {number:d})
    run(self, sockets)
if {early}:
    uvicorn.Server.run = early
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "serve", str(net), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().startswith("serving net at http://127.0.0.1:")
            if not early:
                process.send_signal(number)
            assert process.wait(30) == 0
        finally:
            process.kill()
