"""What the documents say of the code is so."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tvmcap
from tvmcap.cli import make_parser
from tvmcap.kernel import upkeep
from tvmcap.kernel.history import PAUSE_S
from tvmcap.kernel.variants import MAX_VARIANTS
from tvmcap.schedules import TEMPLATES
from tvmcap.schedules.hopper_gemm import Knobs

ROOT = Path(__file__).parent.parent
WORDS = {3: "three", 6: "six", 16: "sixteen"}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_example_of_the_readme_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    quick = code.replace("trials=64, budget_s=60", "trials=2, budget_s=3")
    assert quick != code
    places = f"cache_dir={str(tmp_path / 'cache')!r}, log_dir={str(tmp_path / 'logs')!r}"
    quick = quick.replace("**options)", f"{places}, **options)")
    check = "\nassert y.shape == (300, 4096)"
    done = subprocess.run(
        [sys.executable, "-c", quick + check],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tuned" in done.stdout and "activation traffic" in done.stdout


def test_the_reference_of_the_command_line_is_complete():
    text = (ROOT / "docs" / "cli.md").read_text()
    verbs = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for verb, parser in verbs.choices.items():
        assert f"\n## {verb}\n" in text and f"tvmcap {verb}" in text
        for action in parser._actions:
            names = {n for n in action.option_strings if n.startswith("--")} - {"--help"}
            assert not names or any(n in text for n in action.option_strings), (verb, names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_options_of_the_documents_exist(document):
    verbs = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    fenced = re.split(r"^```.*\n", document.read_text(), flags=re.MULTILINE)[1::2]
    for block in fenced:
        commands = block.replace("\\\n", " ")
        for verb, line in re.findall(r"^tvmcap (\w+)(.*)$", commands, re.MULTILINE):
            known = verbs.choices[verb]._option_string_actions
            for name in re.findall(r"(?<!\S)--?[a-z][a-z-]*", line.partition(" # ")[0]):
                assert name in known, (verb, name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            assert target.exists(), link
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if anchor else []
            slugs = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert not anchor or anchor in slugs, link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_benchmark_commands_of_the_documents_exist(document):
    for block in re.split(r"^```.*\n", document.read_text(), flags=re.MULTILINE)[1::2]:
        commands = re.findall(
            r"^python (benchmarks/\w+\.py)(.*)$", block.replace("\\\n", " "), re.M
        )
        for script, line in commands:
            source = (ROOT / script).read_text()
            words = line.partition("#")[0].split()
            for word in (w for w in words if w.startswith("--")):
                assert f'"{word}"' in source, (script, word)
            for path in (w for w in words if w.startswith("benchmarks/") and "results" not in w):
                assert (ROOT / path).exists(), path
            if words and words[0].islower() and words[0].isalpha():
                assert f'"{words[0]}"' in source, (script, words[0])


def test_the_kernels_of_the_documents_exist():
    text = (ROOT / "docs" / "kernels.md").read_text()
    named = set(re.findall(r"`template:(\w+)`", text))
    assert named == {template.name for template in TEMPLATES}
    knobs = set(Knobs.__dataclass_fields__)
    told = {n for group in re.findall(r"\*\* \((.*?)\)\.", text) for n in re.findall(r"\w+", group)}
    assert told >= {"groups", "late", "tma_store", "cluster_m", "cluster_n", "split", "dependent"}
    assert told <= knobs
    assert f"up to {WORDS[MAX_VARIANTS]} variants" in text


def test_the_defaults_of_prune_are_told():
    text = (ROOT / "docs" / "cli.md").read_text()
    told = (
        f"`--best`\nfastest candidates ({upkeep.BEST}) and a `--sample` of others ({upkeep.SAMPLE})"
    )
    assert told in text and f"--best {upkeep.BEST} --sample {upkeep.SAMPLE}" in text
    assert PAUSE_S == 120 and "more than two minutes" in text


def test_the_public_names_are_documented():
    text = "".join(document.read_text() for document in DOCUMENTS)
    for name in (
        "build",
        "load",
        "tune",
        "verify",
        "bisect",
        "register_template",
        "register_op",
        "explain_capture",
        "Config",
    ):
        assert name in tvmcap.__all__ and re.search(rf"tvmcap[. ]{name}\b", text), name
