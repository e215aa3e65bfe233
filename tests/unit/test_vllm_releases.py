"""tools/fetch_vllm.py and tools/run_release.py: what they decide, without a network."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import fetch_vllm
import run_release

from tests.export_rings import make_ring


def wheel(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, f"# {name}\n")
    return path


def test_of_a_wheel_only_vllms_python_files_are_kept(tmp_path):
    names = (
        "vllm/__init__.py",
        "vllm/a/b.py",
        "vllm/_C.so",
        "vllm/../../escape.py",
        "other/c.py",
        "vllm-1.dist-info/d.py",
    )
    fetch_vllm.extract(wheel(tmp_path / "vllm.whl", *names), tmp_path / "tree")
    found = sorted(path.relative_to(tmp_path / "tree").as_posix() for path in (tmp_path / "tree").rglob("*.py"))
    assert found == ["vllm/__init__.py", "vllm/a/b.py"]
    assert not (tmp_path.parent / "escape.py").exists()


def test_a_wheel_without_vllm_is_an_error(tmp_path):
    with pytest.raises(fetch_vllm.FetchError, match="holds no package vllm"):
        fetch_vllm.extract(wheel(tmp_path / "x.whl", "other/__init__.py"), tmp_path / "tree")


def test_a_tree_that_is_there_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = tmp_path / "vllm-k25-instrument" / "vllm-0.16.0" / "vllm"
    target.mkdir(parents=True)
    monkeypatch.setattr(fetch_vllm, "_download", lambda version, folder: pytest.fail("it was downloaded"))
    assert fetch_vllm.fetch("0.16.0") == target


def test_a_fetched_tree_is_whole_and_its_wheel_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def download(version: str, folder: Path) -> Path:
        folder.mkdir()
        return wheel(folder / f"vllm-{version}.whl", "vllm/__init__.py")

    monkeypatch.setattr(fetch_vllm, "_download", download)
    tree = fetch_vllm.fetch("0.16.0")
    assert [path.name for path in tree.iterdir()] == ["__init__.py"]
    assert [path.name for path in (tmp_path / "vllm-k25-instrument").iterdir()] == ["vllm-0.16.0"]


def test_a_release_that_is_not_to_be_had_is_one_line_and_exit_1(tmp_path):
    command = [sys.executable, fetch_vllm.__file__, "--where", "0.16.0"]
    run = subprocess.run(command, env={"XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert "python tools/fetch_vllm.py 0.16.0" in run.stderr


def test_the_torch_that_a_release_wants_is_taken_of_whatever_build_there_is():
    torch, rest = run_release.without_torch(
        ["torch==2.10.0+cpu; platform_machine == 'x86_64'", "torchvision", "numpy>=2", "ray; extra == 'ray'"]
    )
    assert torch == "torch==2.10.0"
    assert rest == ["numpy>=2"]


@pytest.mark.parametrize(
    ("version", "expected"), [("0.16.0", True), ("0.27.1", True), ("0.28.0", False), ("1.0.0", False)]
)
def test_the_model_is_reduced_where_the_cpu_build_has_no_mla(version, expected):
    assert run_release.reduced(version) is expected


def test_rings_without_the_counts_are_a_failure_that_says_which(tmp_path):
    for rank in range(2):
        make_ring(tmp_path / "instance", rank)
    outcome = run_release.counted("0.32.0", tmp_path)
    assert outcome["outcome"] == "failed"
    assert "decode step" in outcome["note"]
