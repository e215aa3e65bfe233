"""What the documents point at is there: files, headings, commands, options, make targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from vllm_k25_instrument.cli import app

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FOLDERS = ("docs", "deploy", "patches", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
COMMANDS = typer.main.get_command(app).commands

SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def headings(path):
    """The anchors that GitHub makes of the headings of a document."""
    lines = CODE.sub(lambda match: match[0].strip("`") if "\n" not in match[0] else "", path.read_text()).splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def options(command):
    """All options of a command, and of its own commands where it has some."""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(options(inner) for inner in getattr(command, "commands", {}).values()), {"--help", "-h"})


def shell_commands():
    """Calls of `vllm-k25` in the documents' shell examples: (document, the words of the call)."""
    for path in DOCUMENTS:
        for block in SHELL.findall(path.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                for match in re.finditer(r"(?:^|[\s/])vllm-k25 ([a-z].*)", line.partition(" #")[0]):
                    yield path.name, re.split(r"\s[|>&;]", match[1])[0].split()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path):
    dead = []
    for target in LINK.findall(CODE.sub("", path.read_text())):
        file, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        found = (path.parent / file).resolve() if file else path
        if not found.exists() or (anchor and anchor not in headings(found)):
            dead.append(target)
    assert dead == []


def test_the_readme_lists_every_command_with_options_that_it_has():
    rows = re.findall(r"^\| `vllm-k25 ([a-z]+)(.*)$", README.read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == set(COMMANDS)
    for name, rest in rows:
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest))
        assert named <= options(COMMANDS[name]), (name, named - options(COMMANDS[name]))


def test_every_command_in_an_example_exists_with_its_options():
    found = list(shell_commands())
    assert len(found) > 15
    for where, words in found:
        assert words[0] in COMMANDS, (where, words)
        named = {word.partition("=")[0] for word in words if word.startswith("--") and word != "--"}
        assert named <= options(COMMANDS[words[0]]), (where, words)


def test_every_target_of_make_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {(path.name, name) for path in DOCUMENTS for name in re.findall(r"`?\bmake ([a-z-]+)`", path.read_text())}
    assert {name for _, name in named} >= {"lint", "test", "bench"}
    assert [one for one in sorted(named) if one[1] not in targets] == []


def test_what_the_demo_leaves_is_what_the_readme_says():
    source = (ROOT / "vllm_k25_instrument" / "commands" / "demo.py").read_text()
    left = re.findall(r"demo-out/(\w+\.\w+)", README.read_text())
    assert left
    for name in left:
        assert f'out / "{name}"' in source, name
