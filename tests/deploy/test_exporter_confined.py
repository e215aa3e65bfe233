"""The exporter works under what the deployments take away from it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.export_rings import EXPORT, make_ring, touch_everything
from tests.exposition import our_samples

PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1


def export_once(rings, *before):
    result = subprocess.run(
        [*before, *EXPORT, str(rings), "--once"], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return our_samples(result.stdout)


@pytest.fixture
def rings(tmp_path):
    folder = tmp_path / "rings" / "20260101T000000-1"
    writer = make_ring(folder)
    touch_everything(writer.totals)
    yield tmp_path / "rings"
    del writer


def test_it_serves_the_rings_where_no_memory_can_become_executable(rings):
    """`MemoryDenyWriteExecute=yes` of its unit, through the kernel's own switch for it."""
    text = (
        "import ctypes, os, sys\n"
        f"if ctypes.CDLL(None).prctl({PR_SET_MDWE}, {PR_MDWE_REFUSE_EXEC_GAIN}, 0, 0, 0): sys.exit(77)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    probe = subprocess.run([sys.executable, "-c", text, "/bin/true"], check=False)
    if probe.returncode == 77:
        pytest.skip("this kernel has no PR_SET_MDWE (Linux 6.3)")
    assert export_once(rings, sys.executable, "-c", text)


def test_it_serves_the_rings_of_a_mount_that_is_read_only(rings):
    """As the side-car sees them. In a mount namespace of its own, which takes the right to make one."""
    command = (
        'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && ! touch "$1/x" 2>/dev/null && shift && exec "$@"'
    )
    before = ["unshare", "--mount", "sh", "-c", command, "sh", str(rings)]
    try:
        probe = subprocess.run([*before, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if probe.returncode:
        pytest.skip("no mount namespace can be made here")
    assert export_once(rings, *before)
