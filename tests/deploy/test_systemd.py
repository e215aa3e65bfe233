"""systemd takes the units without a complaint, and calls the services well protected."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.deployments import DEPLOY, unit

FOLDER = DEPLOY / "systemd"
SERVER, EXPORTER = "vllm-k25-server.service", "vllm-k25-export.service"
EXPOSURE = {SERVER: 1.8, EXPORTER: 0.9}
"""What `systemd-analyze security` of systemd 252 says; from 10, without any protection, to 0."""


@pytest.fixture(scope="module")
def systemd_analyze(program):
    path = program("systemd-analyze", "Debian package: systemd", in_ci=False)
    version = int(re.search(r"systemd (\d+)", _run(path, "--version").stdout)[1])
    if version < 252:
        pytest.skip(f"systemd {version} cannot score a unit that is not loaded as 252 does")
    return path


def _run(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def installed(tmp_path):
    """The units, with a program that exists in the place of the ones that would be installed."""
    for name in (SERVER, EXPORTER):
        text = (FOLDER / name).read_text()
        assert "=/opt/vllm-k25/bin/" in text
        (tmp_path / name).write_text(re.sub(r"=/opt/vllm-k25/bin/\S+", "=/bin/true", text))
    return tmp_path


def test_systemd_verifies_the_units(systemd_analyze, installed):
    result = _run(systemd_analyze, "verify", installed / SERVER, installed / EXPORTER)
    ours = [line for line in result.stderr.splitlines() if "vllm-k25" in line]
    assert (result.returncode, ours) == (0, [])


def test_systemd_finds_a_setting_that_is_none(systemd_analyze, installed):
    file = installed / EXPORTER
    file.write_text(file.read_text().replace("ProtectClock=", "ProtectClok="))
    assert "ProtectClok" in _run(systemd_analyze, "verify", file).stderr


@pytest.mark.parametrize(("name", "exposure"), EXPOSURE.items())
def test_the_exposure_is_no_higher_than_it_was(systemd_analyze, name, exposure):
    threshold = round(exposure * 10)
    result = _run(
        systemd_analyze, "security", "--offline=true", "--no-pager", f"--threshold={threshold}", FOLDER / name
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("name", "exposure"), EXPOSURE.items())
def test_the_readme_says_the_exposure(name, exposure):
    row = next(line for line in (DEPLOY / "README.md").read_text().splitlines() if line.startswith(f"| `{name}`"))
    assert f"| {exposure} |" in row


def test_the_exporter_is_the_servers_user_and_reads_its_rings():
    server, exporter = unit(SERVER), unit(EXPORTER)
    assert server["User"] == exporter["User"]
    directory = [line for line in server["Environment"] if line.startswith("K25_RING_DIR=")]
    assert directory == [line for line in exporter["Environment"] if line.startswith("K25_RING_DIR=")]


def test_the_rings_are_a_folder_in_the_servers_runtime_directory_which_outlives_it():
    server = unit(SERVER)
    (directory,) = [line.partition("=")[2] for line in server["Environment"] if line.startswith("K25_RING_DIR=")]
    assert Path(directory).parent == Path("/run") / server["RuntimeDirectory"][0]
    assert server["RuntimeDirectoryMode"] == ["0700"]
    assert server["RuntimeDirectoryPreserve"] == ["yes"]


def test_only_this_machine_reaches_the_exporter():
    exporter = unit(EXPORTER)
    assert exporter["IPAddressDeny"] == ["any"]
    assert exporter["IPAddressAllow"] == ["localhost"]
    assert "K25_EXPORT_HOST=127.0.0.1" in exporter["Environment"]


def test_the_exporter_is_not_stopped_with_the_server():
    assert not {"Requires", "BindsTo", "PartOf", "Requisite"} & set(unit(EXPORTER))


@pytest.mark.parametrize("name", [SERVER, EXPORTER])
def test_every_setting_of_ours_is_one(name):
    from vllm_k25_instrument.settings import unknown_variables

    names = [line.partition("=")[0] for line in unit(name)["Environment"]]
    assert [one for one in names if one.startswith("K25_")]
    assert unknown_variables(names) == {}
