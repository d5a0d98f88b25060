"""What the documents say of the code is so."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tvmcap.cli import make_parser

ROOT = Path(__file__).parent.parent
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
    for link in re.findall(r"\]\(([^)#][^)]*)\)", document.read_text()):
        if not link.startswith("http"):
            assert (document.parent / link).exists(), link
