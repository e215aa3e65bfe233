"""Programs and files that several tests here need."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def program():
    """Finds a program, beside this Python or on PATH. Without it the test is skipped; in CI, for one that CI installs,
    it fails."""

    def find(name, where, *, in_ci=True):
        beside = Path(sys.executable).parent / name
        path = str(beside) if beside.exists() else shutil.which(name)
        if path is None:
            reason = f"{name} is not installed ({where})"
            if in_ci and os.environ.get("CI") == "true":
                pytest.fail(reason)
            pytest.skip(reason)
        return path

    return find


@pytest.fixture(scope="session")
def module():
    """Imports a module of the development dependencies. Without it the test is skipped, in CI it fails."""

    def find(name, package):
        try:
            return importlib.import_module(name)
        except ImportError:
            reason = f"{package} is not installed (PyPI)"
            if os.environ.get("CI") == "true":
                pytest.fail(reason)
            pytest.skip(reason)

    return find
