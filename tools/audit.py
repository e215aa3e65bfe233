#!/usr/bin/env python3
"""Known vulnerabilities in what a user of this package installs: its runtime dependencies, looked up by pip-audit.

    .venv/bin/python tools/audit.py [--strict] [-- OPTIONS OF pip-audit]

What is looked up are the versions that are installed beside this Python, with all that they depend on, of the package
itself and of its extra `otel`; not vLLM and not the tools of the tests, which a user's choice does not follow.

Exit codes: 0 nothing known, or no advisory database could be reached (it is said which); 1 something is known; 2 it
cannot be run here; with --strict 3 where anything was not looked up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "vllm-k25-instrument"
EXTRAS = ("", "otel")
TIMEOUT_S = 300
NETWORK_TIMEOUT_S = 10


class CannotRunError(Exception):
    """Why nothing could be looked up, in one line with the remedy."""


def installed_dependencies(package: str = PACKAGE, extras: Iterable[str] = EXTRAS) -> dict[str, str]:
    """Name and installed version of everything that `package` needs at run time, itself left out."""
    found: dict[str, str] = {}
    todo = [(package, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise CannotRunError(f"{name} is not installed beside {sys.executable}: make setup") from None
        if name != package:
            found[canonicalize_name(name)] = distribution.version
        for requirement in map(Requirement, distribution.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted or {""}):
                todo.append((requirement.name, frozenset(requirement.extras) or frozenset({""})))
    return dict(sorted(found.items()))


def look_up(versions: dict[str, str], options: Iterable[str] = ()) -> list[dict]:
    """What pip-audit says of each dependency: its name, and `vulns` or `skip_reason`. Raises CannotRunError."""
    with tempfile.TemporaryDirectory(prefix="k25-audit-") as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
        command = [sys.executable, "-m", "pip_audit", "--requirement", str(file), "--no-deps", "--disable-pip"]
        command += ["--format", "json", "--progress-spinner", "off", "--timeout", str(NETWORK_TIMEOUT_S), *options]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return [{"name": name, "skip_reason": f"no answer in {TIMEOUT_S} s"} for name in versions]
    if "No module named pip_audit" in result.stderr:
        raise CannotRunError("pip-audit is not installed: make setup")
    try:
        listed: list[dict] = json.loads(result.stdout)["dependencies"]
    except (ValueError, KeyError):  # it ends in a traceback where there is no network
        why = (result.stderr.strip().splitlines() or ["no answer"])[-1]
        return [{"name": name, "skip_reason": why} for name in versions]
    return listed


def audit(versions: dict[str, str], options: Iterable[str] = ()) -> list[dict]:
    """`look_up`, the first dependency alone at first: where no database answers, one question is enough."""
    options = tuple(options)
    first = dict(list(versions.items())[:1])
    answer = look_up(first, options)
    if all("skip_reason" in one for one in answer):
        return [{"name": name, "skip_reason": answer[0]["skip_reason"]} for name in versions]
    return look_up(versions, options)


def lines(listed: Iterable[dict]) -> Iterator[str]:
    """The findings, a line each."""
    for one in listed:
        for vulnerability in one.get("vulns", ()):
            known = ", ".join(dict.fromkeys([vulnerability["id"], *vulnerability.get("aliases", ())]))
            fixed = ", ".join(vulnerability.get("fix_versions", ())) or "no version yet"
            yield f"{one['name']} {one['version']}: {known}: fixed in {fixed}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strict", action="store_true", help="exit with 3 where anything was not looked up")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="for pip-audit, after --")
    given = parser.parse_args(arguments)
    try:
        versions = installed_dependencies()
        listed = audit(versions, given.options)
    except CannotRunError as error:
        print(f"audit: {error}", file=sys.stderr)
        return 2
    found = list(lines(listed))
    for line in found:
        print(line)
    skipped = [one for one in listed if "skip_reason" in one]
    looked_up = len(listed) - len(skipped)
    if looked_up:
        print(f"audit: {looked_up} of {len(versions)} dependencies looked up, {len(found)} known vulnerabilities")
    if skipped:
        which = "no advisory database was reached" if not looked_up else ", ".join(one["name"] for one in skipped)
        print(f"audit: NOT looked up: {which} ({' '.join(skipped[0]['skip_reason'].split())[:200]})")
    if found:
        return 1
    return 3 if skipped and given.strict else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
