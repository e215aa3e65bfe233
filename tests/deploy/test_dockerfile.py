"""The image is built from the files that its first stage copies, and does not run as root."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.deploy.deployments import DEPLOY, ROOT

INSTRUCTIONS = [
    line
    for line in (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]


def stages():
    """The instructions of each stage, in order."""
    found = []
    for line in INSTRUCTIONS:
        if line.startswith("FROM "):
            found.append((line.split(" AS ")[1], []))
        elif found:
            found[-1][1].append(line)
    return dict(found)


def copied():
    """Paths of the repository that the first stage copies."""
    paths = [word for line in stages()["wheel"] if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert paths
    return paths


def test_the_copied_files_are_enough_to_build_the_wheel_with_everything_in_it(tmp_path):
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    source.mkdir()
    for path in copied():
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, source / path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    result = subprocess.run(
        [*command, "--wheel-dir", wheels, source], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    (wheel,) = wheels.iterdir()
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "vllm_k25_instrument"
    files = [file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert {str(file.relative_to(ROOT)) for file in files} <= inside


def test_nothing_but_the_copied_files_is_sent_to_the_builder():
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied())


@pytest.mark.parametrize("stage", ["exporter", "server"])
def test_no_image_runs_as_root(stage):
    users = [line for line in stages()[stage] if line.startswith("USER ")]
    assert users[-1] == "USER 2000:0"


def test_the_server_is_what_one_gets_without_naming_a_stage():
    assert list(stages())[-1] == "server"


def test_the_exporter_runs_the_command_that_the_package_installs():
    assert 'ENTRYPOINT ["vllm-k25", "export"]' in stages()["exporter"]
    assert 'ENTRYPOINT ["vllm", "serve"]' in stages()["server"]
