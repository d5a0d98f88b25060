"""The library behind a name: what is checked before it is served, and how requests are joined."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import tvmcap
from tests.serving import WIDTH, Net, export
from tvmcap.base.errors import (
    ConfigError,
    DamagedLibraryError,
    IncompatibleLibraryError,
    InputError,
    LibraryError,
    VerifyError,
)
from tvmcap.base.manifest import read_manifest, rewrite_manifest
from tvmcap.base.signature import DimSpec, TensorSpec
from tvmcap.deploy_verbs import draw_rows
from tvmcap.runtime.serving.app import App
from tvmcap.runtime.serving.batching import Limits
from tvmcap.runtime.serving.library import (
    Sample,
    ServedLibrary,
    batch_dimension,
    check_successor,
)


def drawn(signature):
    return Sample(draw_rows(signature))


def serve(path, sample=drawn, batched=True):
    return ServedLibrary(path, tvmcap.load, sample, batched)


def test_joined_requests_get_the_rows_that_they_asked_for(net):
    library, model = serve(net), Net(0).eval()
    requests = [[np.random.randn(n, WIDTH).astype(np.float32)] for n in (1, 3, 0, 2)]
    for request, (got,) in zip(requests, library.run(requests), strict=True):
        want = model(torch.from_numpy(request[0])).detach().numpy()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert [library.place(request)[0] for request in requests] == [1, 3, 0, 2]
    with pytest.raises(InputError, match="expected size 16"):
        library.place([np.zeros((2, 17), np.float32)])
    with pytest.raises(InputError, match="at most 512"):
        library.place([np.zeros((513, WIDTH), np.float32)])


def test_what_happens_to_the_file_does_not_touch_what_runs(net, tmp_path):
    path = tmp_path / "net.so"
    shutil.copyfile(net, path)
    library, x = serve(path), np.ones((2, WIDTH), np.float32)
    before = library.run([[x]])[0][0]
    with open(path, "r+b") as file:
        file.write(b"\0" * file.seek(0, os.SEEK_END))
    assert np.array_equal(library.run([[x]])[0][0], before)
    path.unlink()
    assert np.array_equal(library.run([[x]])[0][0], before)


def test_a_file_written_over_in_place_is_another_library(net, successor, tmp_path):
    path, x = tmp_path / "net.so", np.ones((2, WIDTH), np.float32)
    shutil.copyfile(net, path)
    first = serve(path)
    shutil.copyfile(successor, path)  # the same inode
    second = serve(path)
    assert not np.allclose(first.run([[x]])[0][0], second.run([[x]])[0][0])
    assert first.sha256 != second.sha256


def test_rows_that_depend_on_each_other_are_not_joined(stranger):
    with pytest.raises(ConfigError, match=r"rows of a batch depend on each other.*max-batch 1"):
        serve(stranger)
    library = serve(stranger, batched=False)
    x = np.random.randn(4, 8).astype(np.float32)
    np.testing.assert_allclose(library.run([[x, x]])[0][0], 2 * x - x.mean(0), rtol=1e-4, atol=1e-5)


def test_a_sample_of_one_row_does_not_hide_that_rows_depend(stranger):
    x = np.random.randn(1, 8).astype(np.float32)

    def sample(signature):  # the mean of one row is the row
        return Sample(draw_rows(signature), (x, x), {"out0": x})

    serve(stranger, sample, batched=False)
    with pytest.raises(ConfigError, match="rows of a batch depend on each other"):
        serve(stranger, sample)


def with_bounds(path, source, least, most):
    """Copy a library with another bound of its batch."""
    shutil.copyfile(source, path)
    manifest = read_manifest(path)
    dims = (DimSpec(manifest.signature.dims[0].name, least, most),)
    rewrite_manifest(
        path,
        dataclasses.replace(manifest, signature=dataclasses.replace(manifest.signature, dims=dims)),
    )
    return path


@pytest.mark.parametrize(("least", "most"), [(2, 512), (200, 300), (512, 512)])
def test_a_library_that_takes_no_single_row_is_checked_on_more(
    net, stranger, tmp_path, least, most
):
    assert serve(with_bounds(tmp_path / "net.so", net, least, most))
    if most > least:
        with pytest.raises(ConfigError, match="rows of a batch depend on each other"):
            serve(with_bounds(tmp_path / "stranger.so", stranger, least, most))


def test_no_batch_has_more_rows_than_the_library_takes(net, tmp_path):
    path = with_bounds(tmp_path / "net.so", net, 0, 8)
    app = App("net", lambda _: serve(path), Limits(32, 0.05, 100), 10**6, False)
    xs = [np.random.randn(n, WIDTH).astype(np.float32) for n in (3, 1, 8, 3, 3, 2, 7, 1)]

    async def scene():
        async with app._lifespan(None):
            asked = [app._batcher.submit([x], *app._served.place([x])) for x in xs]
            return await asyncio.gather(*asked)

    model = Net(0).eval()
    for x, (got,) in zip(xs, asyncio.run(scene()), strict=True):
        want = model(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_library_without_a_batch_is_not_joined(tmp_path):
    path = export(Net(0).eval(), tmp_path / "static.so", torch.randn(4, WIDTH), dynamic=None)
    with pytest.raises(ConfigError, match=r"same dynamic dimension in front.*max-batch 1"):
        serve(path)
    library = serve(path, batched=False)
    assert library.batch_dim is None
    assert library.run([[np.zeros((4, WIDTH), np.float32)]])[0][0].shape == (4, WIDTH)


def test_the_batch_stands_in_front_everywhere_and_nowhere_else(net):
    signature = read_manifest(net).signature
    assert batch_dimension(signature) == signature.inputs[0].shape[0]
    (name,) = (dim.name for dim in signature.dims)
    for shape in ((WIDTH, name), (f"{name}*2", WIDTH), (name, f"{name}*2"), ("C", WIDTH), ()):
        out = dataclasses.replace(signature.outputs[0], shape=shape)
        assert batch_dimension(dataclasses.replace(signature, outputs=(out,))) is None


def test_outputs_are_held_to_the_sample(net):
    x = np.random.randn(3, WIDTH).astype(np.float32)
    good = Net(0).eval()(torch.from_numpy(x)).detach().numpy()
    assert serve(net, lambda _: Sample((x,), (x,), {"out0": good}))
    wrong, nan = good.copy(), good.copy()
    wrong[1, 2] += 0.01
    nan[0, 0] = np.nan
    for bad in (wrong, nan, good[:2]):
        with pytest.raises(VerifyError, match="out0"):
            serve(net, lambda _, bad=bad: Sample((x,), (x,), {"out0": bad}))


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    elif how == "foreign":
        shutil.copyfile("/proc/self/exe", path)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "gone":
        path.unlink()
    else:
        manifest = read_manifest(path)
        changes = {"versions": {**manifest.versions, "tvm": "0.1"}}
        if how == "signature":  # the manifest says more than the code takes
            more = TensorSpec("more", "float32", (3,))
            inputs = (*manifest.signature.inputs, more)
            tree = {"kind": "tuple", "items": [{"kind": "leaf", "index": i} for i in (0, 1)]}
            names = (*manifest.signature.arg_names, "more")
            changes = {
                "signature": dataclasses.replace(
                    manifest.signature, inputs=inputs, in_tree=tree, arg_names=names
                )
            }
        rewrite_manifest(path, dataclasses.replace(manifest, **changes))


SPOILT = {
    "truncated": DamagedLibraryError,
    "flipped": DamagedLibraryError,
    "foreign": DamagedLibraryError,
    "empty": DamagedLibraryError,
    "gone": LibraryError,
    "another TVM": IncompatibleLibraryError,
    "signature": LibraryError,
}


@pytest.mark.parametrize("how", SPOILT)
def test_files_that_are_no_good(net, tmp_path, how):
    path = tmp_path / "bad.so"
    shutil.copyfile(net, path)
    spoil(path, how)
    with pytest.raises(SPOILT[how]):
        serve(path, batched=False)


def test_a_successor_takes_what_the_old_one_took(net, stranger):
    old = read_manifest(net).signature
    check_successor(old, old)
    with pytest.raises(LibraryError, match="inputs differ: expected x: float32"):
        check_successor(old, read_manifest(stranger).signature)
    (dim,) = old.dims
    wider, narrower = (
        dataclasses.replace(old, dims=(DimSpec(dim.name, 0, most),)) for most in (1024, 511)
    )
    check_successor(old, wider)
    with pytest.raises(LibraryError, match="takes from 0 to 511 only"):
        check_successor(old, narrower)


def test_replaced_libraries_leave_nothing_behind(net):
    process, x = psutil.Process(), np.ones((2, WIDTH), np.float32)
    gc.collect()  # what other tests left

    def count():
        maps = [m.path for m in process.memory_maps(grouped=False) if "tvmcap-serve-" in m.path]
        return len(maps), process.num_fds()

    serve(net).run([[x]])
    before = count()
    for _ in range(5):
        serve(net).run([[x]])
    assert count() == before


@pytest.mark.gpu
def test_a_library_for_a_gpu_is_served_from_host_arrays(tmp_path):
    from tests import libs

    model = Net(0).eval().cuda()
    lib = libs.quick(model, torch.randn(4, WIDTH).cuda(), target="cuda", dynamic={0: {0: "B"}})
    library = serve(lib.export(tmp_path / "net.so"))
    requests = [[np.random.randn(n, WIDTH).astype(np.float32)] for n in (1, 3)]
    for request, (got,) in zip(requests, library.run(requests), strict=True):
        want = model(torch.from_numpy(request[0]).cuda()).detach().cpu().numpy()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def post(app, path):
    """Send an empty POST to the application; return the status and the answer."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"headers": [], "query_string": b"", "root_path": "", "http_version": "1.1"}
    asyncio.run(app.starlette()(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_whatever_goes_wrong_with_a_new_library_the_old_one_stays(net):
    def load(like):
        if like is not None:
            raise ZeroDivisionError("a defect")
        return serve(net)

    app = App("net", load, Limits(8, 0.0, 8), 10**6, swaps=True)
    old = app._served
    status, said = post(app, "/v2/repository/models/net/load")
    assert status == 500 and "net stays as it was: ZeroDivisionError" in said["error"]
    assert app._served is old
    assert b'tvmcap_swaps_total{outcome="refused"} 1.0' in app._metrics.text()


def test_a_successor_whose_manifest_names_no_dimension(net):
    signature = serve(net).signature
    unnamed = dataclasses.replace(signature, dims=())
    check_successor(signature, unnamed)  # without bounds it takes what the old one takes
