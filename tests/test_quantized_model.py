"""A classifier in 8 bits loses nothing that counts, where one scale a tensor loses points.

It tells which folder of this repository a passage is from: the sum of its words' embeddings goes
through a small network. Passages are 1 to 256 lines long, so some sums are a hundred times others.
That is what one scale for a whole tensor cannot hold and one a row can; nothing is rescaled for it.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.quantizing import build

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tvmcap/capture", "tvmcap/kernel", "schedules", "tests", "benchmarks", "docs")
WORDS, LONGEST = 1024, 8  # vocabulary; logarithm to base 2 of the lines of a passage
POINTS = 0.5
PART = 480  # passages at once
SEEDS = 4  # one model's loss varies by a point from seed to seed; the mean is compared


def lines_of(path: Path) -> list[list[str]]:
    """Split a file into the words and signs of its lines."""
    text = path.read_text(encoding="utf-8")
    return [re.findall(r"[A-Za-z]+|\d+|[^\sA-Za-z\d]", x) for x in text.splitlines() if x.strip()]


def halves(files: list[Path]) -> tuple[list[list[list[str]]], list[list[list[str]]]]:
    """Return the first three quarters of each file, to learn from, and the rest, to test on."""
    texts = [text for path in files if len(text := lines_of(path)) >= 32]
    return [x[: len(x) * 3 // 4] for x in texts], [x[len(x) * 3 // 4 :] for x in texts]


def passages(texts, count, vocabulary, draw) -> np.ndarray:
    """Draw passages of random length and return how often each word occurs, [count, WORDS]."""
    made = []
    for number, text in enumerate(texts):
        share = (number + 1) * count // len(texts) - number * count // len(texts)
        before = np.zeros((len(text) + 1, WORDS), np.float32)
        for i, line in enumerate(text):
            known = [vocabulary[word] for word in line if word in vocabulary]
            np.add.at(before[i + 1], known, 1)
        before = before.cumsum(axis=0)
        size = np.minimum(2 ** (LONGEST * draw.random(share)), len(text)).astype(int)
        start = (draw.random(share) * (len(text) - size + 1)).astype(int)
        made.append(before[start + size] - before[start])
    return np.concatenate(made)


def data():
    """Return (inputs, folders) to learn from, and the same to test on."""
    parts = [
        halves(sorted(p for p in (ROOT / f).glob("*.*") if p.suffix in (".py", ".md")))
        for f in FOLDERS
    ]
    known = Counter(word for learnt, _ in parts for text in learnt for x in text for word in x)
    vocabulary = {word: i for i, (word, _) in enumerate(known.most_common(WORDS))}
    draw = np.random.default_rng(0)
    sets = []
    for half, count in ((0, 480), (1, 720)):
        inputs = [passages(part[half], count, vocabulary, draw) for part in parts]
        labels = np.repeat(np.arange(len(FOLDERS)), count)
        sets.append((torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(labels)))
    return sets


class Classifier(nn.Module):
    """The sum of the words' embeddings, and a network of two hidden layers on it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WORDS, 48, bias=False)
        self.up, self.mid = nn.Linear(48, 96), nn.Linear(96, 96)
        self.head = nn.Linear(96, len(FOLDERS))

    def forward(self, counts):
        h = torch.relu(self.mid(torch.relu(self.up(self.embed(counts)))))
        return self.head(h)


class Several(nn.Module):
    """Independent classifiers side by side: logits [models, passages, folders]."""

    def __init__(self, models):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, counts):
        return torch.stack([model(counts) for model in self.models])


def train(x, y, seed, steps=300) -> Classifier:
    torch.manual_seed(seed)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for _ in range(steps):
        batch = torch.randint(len(x), (128,))
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
    return model.eval()


def naive(several: Several, seen: torch.Tensor):
    """Return the control: int8 with one scale for each weight and each layer's input.

    The scales are of the largest magnitudes, of inputs over ``seen``.
    """
    runs = [naive_one(model, seen) for model in several.models]
    return lambda x: torch.stack([run(x) for run in runs])


def naive_one(model, seen: torch.Tensor):
    """Return the control of one classifier."""
    tops: dict[nn.Module, torch.Tensor] = {}

    def observe(layer, args):
        tops[layer] = args[0].abs().max()

    layers = [x for x in model.modules() if isinstance(x, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(observe) for layer in layers]
    model(seen)
    for hook in hooks:
        hook.remove()

    def rounded(values, top):
        return torch.clamp(torch.round(values * (127 / top)), -127, 127) * (top / 127)

    def product(layer, h):
        weight = rounded(layer.weight, layer.weight.abs().max())
        return nn.functional.linear(rounded(h, tops[layer]), weight, layer.bias)

    def run(x):
        h = torch.relu(product(model.up, product(model.embed, x)))
        return product(model.head, torch.relu(product(model.mid, h)))

    return run


@pytest.fixture(scope="module")
def trained():
    """Return the models, what they learnt from, and what they are tested on."""
    (x, y), test = data()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more are slower on products this small
    model = Several([train(x, y, seed) for seed in range(SEEDS)]).eval()
    torch.set_num_threads(threads)
    return model, x, test


def accuracy(run, test) -> float:
    """Return the percentage of passages whose folder is found, the mean over the models."""
    x, y = test
    found = torch.cat([run(part).argmax(dim=-1) for part in x.split(PART)], dim=-1)
    return 100 * float((found == y).double().mean())


@torch.no_grad()
def test_one_scale_a_tensor_loses_points(trained) -> None:
    model, seen, test = trained
    whole = accuracy(model, test)
    assert whole >= 60  # of 17 by guessing
    assert accuracy(naive(model, seen), test) <= whole - 2


@pytest.mark.parametrize(("scheme", "dtype"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
@torch.no_grad()
def test_one_scale_a_row_loses_none(scheme, dtype, trained, tmp_path) -> None:
    model, _, test = trained
    lib = build(model, test[0][:PART], tmp_path, quantize=scheme, dynamic=None)
    assert [x.scheme for x in lib.accuracy.layers] == [dtype] * 4 * SEEDS
    assert accuracy(lib, test) >= accuracy(model, test) - POINTS
