# %% [markdown]
# # Deploy a library and serve it
#
# A library is one file of machine code. Here you take it to two places: into a folder that runs on
# a machine without Python, and behind HTTP, where requests of many clients run together and a new
# version comes in while they go on. Run it top to bottom:
# `python tutorials/06_deploy_and_serve.py`.
#
# It runs on the CPU in less than half a minute. The server needs `pip install 'tvmcap[serve]'`;
# `docs/deploying.md` has the details.

# %%
import atexit
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn

import tvmcap

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp(prefix="tvmcap-tutorial-"))

# %% [markdown]
# ## 1. A library of any batch size
#
# The first dimension of the argument and of the result is `B`: that is what lets a server join the
# rows of several requests in one call.


# %%
def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).eval()


def build(seed, path):
    dynamic = {0: {0: tvmcap.Dim("B", max=1024)}}
    options = {"target": "llvm", "dynamic": dynamic, "tune": "none", "verify": False}
    lib = tvmcap.build(network(seed), (torch.randn(4, 64),), **options)
    return lib.export(path)


def save_sample(seed, path):
    x = torch.randn(5, 64)
    with torch.no_grad():
        np.savez(path, **{argument: x.numpy(), "out0": network(seed)(x).numpy()})


path = build(0, folder / "net.so")
lib = tvmcap.load(path)
(argument,) = lib.signature.arg_names
print(lib.signature.inputs, lib.signature.outputs)

# %% [markdown]
# ## 2. A sample
#
# Inputs and the outputs that PyTorch gives for them, in one file. Whoever gets the library can
# check it with that: the program of the next step, and the server before it takes a new version.
# (`tvmcap run net.so --sample FILE` writes a sample of the library's own results.)

# %%
sample = folder / "sample.npz"
save_sample(0, sample)

# %% [markdown]
# ## 3. Without Python
#
# `tvmcap package` gathers the library, the parts of TVM's runtime that it needs, their licences and
# a small C++ program (the source is `examples/cpp/run.cpp`). Copy the folder anywhere. Here it runs
# with an empty environment, so that it finds nothing of this one.


# %%
def tvmcap_command(*words):
    return [sys.executable, "-m", "tvmcap", *map(str, words)]


packed = folder / "dist"
if shutil.which("g++") or shutil.which("clang++"):
    subprocess.run(tvmcap_command("package", path, "-o", packed, "--sample", sample), check=True)
    command = ["./run", "net.so", "sample.safetensors"]
    done = subprocess.run(command, cwd=packed, env={}, capture_output=True, text=True, check=True)
    print(sorted(p.name for p in (packed / "lib").iterdir()))
    print(done.stdout)
    assert "ok" in done.stdout

# %% [markdown]
# ## 4. Behind HTTP
#
# One command serves it: to this machine alone unless `--host` says otherwise. Requests wait up to
# `--max-delay-ms` for others, and up to `--max-batch` rows run together.

# %%
options = ["--max-batch", "32", "--max-delay-ms", "3", "--sample", sample, "--port", "0"]
server = subprocess.Popen(
    tvmcap_command("serve", path, *options), stdout=subprocess.PIPE, text=True
)
atexit.register(server.kill)
line = server.stdout.readline()
print(line)
url = line.split(" at ")[1].strip()

# %% [markdown]
# ## 5. The protocol
#
# The server speaks the Open Inference Protocol v2, as KServe and Triton do, so that their clients
# work: `tritonclient[http]` sends tensors as binary data, which is what you want for large ones.
# Small ones can go as JSON, with nothing but the standard library.


# %%
def post(where, data=None):
    body = json.dumps(data or {}).encode()
    with urllib.request.urlopen(urllib.request.Request(url + where, body)) as answer:
        return json.loads(answer.read() or "{}")


def infer(x):
    entry = {"name": argument, "datatype": "FP32", "shape": list(x.shape), "data": x.tolist()}
    output = post("/v2/models/net/infer", {"inputs": [entry]})["outputs"][0]
    return torch.tensor(output["data"]).reshape(output["shape"])


with urllib.request.urlopen(f"{url}/v2/models/net") as answer:
    print(json.loads(answer.read()))
x = torch.randn(3, 64)
with torch.no_grad():
    torch.testing.assert_close(infer(x), network(0)(x), rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## 6. Many clients at once
#
# Each gets the rows that it asked for, and the figures for Prometheus tell how many batches they
# shared. What helps is that weights are read once for a batch and not once for a row:
# `benchmarks/serving.py` measures it on a network whose weights do not fit the cache.

# %%
xs = [torch.randn(1, 64) for _ in range(64)]
with ThreadPoolExecutor(16) as pool:
    answers = list(pool.map(infer, xs))
with torch.no_grad():
    for x, y in zip(xs, answers, strict=True):
        torch.testing.assert_close(y, network(0)(x), rtol=1e-4, atol=1e-4)


def figure(name):
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return float(next(text.split()[-1] for text in lines if text.startswith(name)))


batches, rows = figure("tvmcap_batch_rows_count"), figure("tvmcap_batch_rows_sum")
print(f"{rows:.0f} rows in {batches:.0f} batches")
assert rows == 67 and batches < 65

# %% [markdown]
# ## 7. A new version, without a pause
#
# Put the new library where the old one is, and its sample where the old sample is; then ask the
# server to load it. It is loaded beside the old one and must give the sample's outputs. Only then
# do the next batches go to it. One that fails the check is refused, and the old one stays: here
# first the new library with the old sample.

# %%
build(1, path)
try:
    post("/v2/repository/models/net/load")
    raise AssertionError("it must be refused")
except urllib.error.HTTPError as error:
    print(error.code, json.loads(error.read())["error"])
    assert error.code == 422
x = torch.randn(3, 64)
with torch.no_grad():
    torch.testing.assert_close(infer(x), network(0)(x), rtol=1e-4, atol=1e-4)
    save_sample(1, sample)
    print(post("/v2/repository/models/net/load"))
    torch.testing.assert_close(infer(x), network(1)(x), rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## 8. The end
#
# SIGTERM is what service managers send. The server takes no new connections, answers what it has,
# and exits with status 0.

# %%
server.send_signal(signal.SIGTERM)
assert server.wait(30) == 0
print("the server ended with status", server.returncode)

# %% [markdown]
# ## Where to go next
#
# * `docs/deploying.md`: limits, back-pressure (429 and when to come back), metrics.
# * `examples/cpp`: how to call a library from a program of your own.
# * `benchmarks/soak.py`, `make soak`: ten minutes with a client killed every second.

# %%
shutil.rmtree(folder)
