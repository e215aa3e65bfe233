"""docs/security.md, claim by claim: what is read is data, what is shown is text, what is written is private."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

import vllm_k25_instrument
from tests.samples import run_python
from tests.unit.test_report_rings import open_rank
from vllm_k25_instrument import instances
from vllm_k25_instrument.analysis.classify import Classifier
from vllm_k25_instrument.analysis.step_names import parse_step_name
from vllm_k25_instrument.campaign import samples_file
from vllm_k25_instrument.campaign.errors import CampaignError
from vllm_k25_instrument.cli import app
from vllm_k25_instrument.commands import documents
from vllm_k25_instrument.commands.terminal import Terminal
from vllm_k25_instrument.export.server import registry_of, serving
from vllm_k25_instrument.instances import check_default_is_ours, ensure_private_directory, find_rings
from vllm_k25_instrument.plain_text import one_line, without_controls
from vllm_k25_instrument.settings import Settings

SOURCE = Path(vllm_k25_instrument.__file__).parent
METADATA = 256, 256 + 64 * 1024
"""Where a ring's two copies of its metadata are."""

HOSTILE = (
    "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202eright to left [bold red]markup[/] :warning: \ud800 "
    "<script>alert(1)</script> | `code` \"quoted\" 'too' &lt; \n# heading\r## heading {{ 7*7 }} $(id) ${HOME} %s {0}"
)
"""A name with something in it for everything that could take it for more than a name."""

OBEYED = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def assert_plain(result, codes):
    """The command ended as it should, not in a traceback, and a terminal has nothing to obey."""
    assert result.exit_code in codes, (result.exception, result.output)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not OBEYED.findall(result.output)


# --- hostile rings -------------------------------------------------------------------------------------------


@pytest.fixture
def hostile_ring(tmp_path):
    """Makes a ring whose metadata are changed, its checksums right."""

    def make(**changes):
        folder = tmp_path / "20260101T000000-1"
        rank = open_rank(folder, 0, 1, instance=folder.name)
        for _ in range(3):
            rank.write()
        path = rank.writer.path
        del rank
        data = bytearray(path.read_bytes())
        for at in METADATA:
            sequence, length, _ = struct.unpack_from("<QII", data, at)
            if sequence:
                document = json.loads(data[at + 16 : at + 16 + length])
                document["identity"]["coordinates"] |= changes.get("coordinates", {})
                document["identity"] |= {name: value for name, value in changes.items() if name != "coordinates"}
                text = json.dumps(document).encode()
                data[at : at + 16 + len(text)] = struct.pack("<QII", sequence, len(text), zlib.crc32(text)) + text
        path.write_bytes(data)
        return folder

    return make


def commands(folder, out):
    yield "report", folder
    yield "report", folder, "--html", out / "page.html", "--json", out / "b.json", "--markdown", out / "b.md"
    yield "report", folder, "--markdown", "-"
    yield "report", folder, "--json", "-"
    yield "top", folder, "--once"
    yield "export", folder, "--once"
    yield "whatif", folder, "--moe", "x0.5"


def test_names_in_a_ring_are_text_in_everything_that_is_made_of_it(hostile_ring, tmp_path):
    folder = hostile_ring(
        model=HOSTILE,
        instance=HOSTILE,
        vllm_version=HOSTILE,
        plugin_version=HOSTILE,
        hooks={HOSTILE: "attached", "all_reduce": HOSTILE},
    )
    for command in commands(folder, tmp_path):
        assert_plain(run(*command), (0, 3))
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "{{" not in page.replace("{{ 7*7 }}", "")
    markdown = (tmp_path / "b.md").read_text()
    assert not re.search(r"^#+ heading", markdown, re.MULTILINE)
    assert "<script>" not in re.sub(r"`[^`\n]*`", "", markdown)
    metrics = run("export", folder, "--once").stdout
    (info,) = [line for line in metrics.splitlines() if line.startswith("vllm_k25_build_info{")]
    assert r"\"quoted\"" in info
    shown = run("report", folder).stdout
    assert "[bold red]markup[/] :warning:" in shown


@pytest.mark.parametrize(
    "changes",
    [
        {"coordinates": {"tp_size": 10**12}},
        {"coordinates": {"tp_size": -1}},
        {"coordinates": {"tp_size": 0}},
        {"coordinates": {"global_rank": 10**300}},
        {"coordinates": {"global_rank": -7}},
        {"started_unix_ns": 10**40},
        {"started_unix_ns": -(10**30)},
        {"sample_every": 0},
        {"sample_every": 10**300},
        {"pid": -1},
        {"layers": {"moe": -1}},
    ],
    ids=str,
)
def test_numbers_that_cannot_be_make_a_ring_unreadable_and_nothing_else(hostile_ring, tmp_path, changes):
    folder = hostile_ring(**changes)
    for command in commands(folder, tmp_path):
        assert_plain(run(*command), (1,))
    assert "unreadable metadata" in run("report", folder).output


# --- the terminal --------------------------------------------------------------------------------------------


def printed(renderable, **options):
    terminal = Terminal(**options)
    terminal.file = io.StringIO()
    terminal.print(renderable)
    return terminal.file.getvalue()


def in_a_table():
    table = Table("a", HOSTILE)
    table.add_row(HOSTILE, Text(HOSTILE))
    return table


@pytest.mark.parametrize("renderable", [HOSTILE, Text(HOSTILE), in_a_table()], ids=["text", "Text", "table"])
def test_a_terminal_shows_markup_and_controls_and_obeys_neither(renderable):
    shown = printed(renderable)
    assert not OBEYED.findall(shown)
    assert "[bold red]markup[/] :warning:" in shown
    assert "\ufffd[31mred" in shown


def test_a_terminal_keeps_its_own_colours(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in printed(Text("red", style="red"))


def test_text_in_any_script_stays_as_it_is():
    names = "模型 Ünïcödé → ■ µs… 😀 a\u00a0b"
    assert without_controls(names) == names
    assert one_line(f" {names}\n") == names.replace("\u00a0", " ")


# --- traces and what comes with them ---------------------------------------------------------------------------


def test_a_folder_of_files_with_hostile_names_is_one_line_each(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("\x1b[31mred\nwarning all is well.json", "$(touch pwned).sqlite", "[bold]x.txt"):
        (folder / name).write_bytes(b"{\x00" * 40)
    result = run("analyze", folder)
    assert_plain(result, (2,))
    result = run("analyze", folder / "\x1b[31mred\nwarning all is well.json")
    assert_plain(result, (2,))
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (Path.cwd() / "pwned").exists()


@pytest.mark.parametrize("text", ["a = " + "[" * 50_000, "[" + "a." * 2_000 + "b]\n" + "{" * 9, "#" * (1 << 21)])
def test_a_rules_file_that_nests_without_end_or_is_no_rules_file_is_one_line(tmp_path, text):
    file = tmp_path / "rules.toml"
    file.write_text(text)
    result = run("classify", "--rules", file, "k")
    assert_plain(result, (2,))
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "part",
    [
        "a",
        "1",
        "_",
        "aB",
        "a1",
        " ",
        ".kd",
        " [clone x]",
        "[clone ",
        "(anonymous namespace",
        "::",
        "<",
        "L1a",
        "x=",
        "...",
    ],
)
def test_a_name_of_thousands_of_equal_parts_takes_no_time(part):
    classifier = Classifier.load()
    for begin in ("", "_ZN1a", "decode step ", "step[", "execute_context_"):
        name = begin + part * (16_384 // len(part)) + "!"
        start = time.process_time()
        classifier.explain(name, [name])
        parse_step_name(name)
        assert time.process_time() - start < 1, begin


@pytest.mark.parametrize("command", [("compare", "{}", "{}"), ("whatif", "{}", "--moe", "x0.5")])
@pytest.mark.parametrize(
    "text",
    [
        '{"schema": "vllm_k25.breakdown/1", "groups": ' + "[" * 100_000,
        '{"schema": "vllm_k25.breakdown/1", "source": ' + json.dumps(HOSTILE) + "}",
        '{"schema": "vllm_k25.breakdown/1", "source": "ring", "complete": true, "groups": [{"steps": 1e999}]}',
        '{"schema": "vllm_k25.breakdown/1", "source": "ring", "complete": true, "groups": [{"steps": ' + "9" * 5000,
    ],
    ids=["depth", "source", "infinity", "digits"],
)
def test_a_saved_breakdown_that_is_none_is_one_line(tmp_path, command, text):
    file = tmp_path / "b.json"
    file.write_text(text)
    result = run(*(part.format(file) if part == "{}" else part for part in command))
    assert_plain(result, (2,))
    assert len(result.stderr.strip().splitlines()) == 1


def test_more_json_than_a_breakdown_has_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT", 5_000)
    file = tmp_path / "b.json"
    file.write_text('{"schema": "vllm_k25.breakdown/1", "groups": [' + "{}," * 5_000 + "{}]}")
    result = run("compare", file, file)
    assert_plain(result, (2,))
    assert "of JSON: no breakdown" in result.stderr


def test_the_samples_of_a_campaign_do_not_inflate_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(samples_file, "MAX_BYTES", 1 << 20)
    (tmp_path / "rank-00000.samples").write_bytes(zlib.compress(bytes(1 << 24)))
    with pytest.raises(CampaignError, match="inflates to more than 1 MiB"):
        samples_file.read_samples(tmp_path)


def test_names_in_a_saved_breakdown_are_text(tmp_path):
    group = {
        "phase": HOSTILE,
        "batch": HOSTILE,
        "graph_mode": HOSTILE,
        "steps": 1,
        "unattributed_ns": 5,
        "categories": {HOSTILE: {"exclusive_ns": 5}},
    }
    document = {"schema": "vllm_k25.breakdown/1", "source": "ring", "complete": True, "groups": [group]}
    file = tmp_path / "b.json"
    file.write_text(json.dumps(document))
    assert_plain(run("compare", file, file), (0,))
    assert_plain(run("compare", file, file, "--json", "-"), (0,))
    assert_plain(run("whatif", file, "--moe", "x0.5"), (0, 1, 3))


# --- code ----------------------------------------------------------------------------------------------------

RUNS_CODE = {
    *("eval", "exec", "compile", "__import__"),
    *("os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads"),
    *("shelve.open", "torch.load", "numpy.load", "np.load", "yaml.load", "subprocess.getoutput"),
}


def calls():
    """Every call in the package: (where, what is called, the names of its arguments)."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                named = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", ast.unparse(node.func), named


def test_nothing_is_evaluated_unpickled_or_handed_to_a_shell():
    found = list(calls())
    assert len(found) > 2_000
    assert [(where, what) for where, what, _ in found if what in RUNS_CODE] == []
    shells = [(where, named["shell"]) for where, _, named in found if "shell" in named]
    assert [one for one in shells if one[1] != "False"] == []


def test_whatever_is_printed_goes_through_the_terminal_that_obeys_nothing():
    consoles = [where for where, what, _ in calls() if what in ("Console", "rich.print", "rich.console.Console")]
    assert consoles == []


def test_the_template_of_the_page_never_switches_escaping_off():
    template = (SOURCE / "report" / "report.html.j2").read_text()
    assert "safe" not in re.findall(r"\|\s*(\w+)", template)
    assert "autoescape" not in template
    assert "autoescape=True" in (SOURCE / "report" / "html.py").read_text()


# --- files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def default(tmp_path, monkeypatch):
    """The default ring directory, in a place that is there for everybody."""
    shared = tmp_path / "shm"
    shared.mkdir()
    shared.chmod(0o1777)
    path = shared / f"vllm_k25-{os.getuid()}"
    monkeypatch.setattr(instances, "default_ring_directory", lambda: path)
    return path


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_default_directory_that_another_user_made_first_is_neither_written_nor_read(default, monkeypatch):
    open_rank(default / "20260101T000000-1", 0, 1).write()
    assert find_rings(default)
    os.chown(default, 65_534, 65_534)
    for use in (ensure_private_directory, find_rings, check_default_is_ours):
        with pytest.raises(PermissionError, match="user 65534"):
            use(default)
    monkeypatch.setenv("K25_RING_DIR", str(default))
    for command in (("report",), ("top", "--once"), ("export", "--once"), ("whatif", "--moe", "x0.5")):
        result = run(*command)
        assert result.exit_code in (1, 2)
        assert "its owner is user 65534" in result.output


def test_a_default_directory_that_is_a_link_is_neither_written_nor_read(default, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    open_rank(elsewhere / "20260101T000000-1", 0, 1).write()
    default.symlink_to(elsewhere)
    for use in (ensure_private_directory, find_rings):
        with pytest.raises(OSError, match="link"):
            use(default)


def test_a_directory_that_is_exchanged_for_a_link_while_it_is_looked_at_leaves_its_target_alone(tmp_path, monkeypatch):
    directory, target = tmp_path / "rings", tmp_path / "target"
    for path in (directory, target):
        path.mkdir()
        path.chmod(0o755)

    def exchange(path, mode):
        path.rmdir()
        path.symlink_to(target)

    monkeypatch.setattr(instances, "_check_that_nobody_else_needs_it", exchange)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        ensure_private_directory(directory)
    assert target.stat().st_mode & 0o777 == 0o755


def test_everything_that_a_worker_leaves_is_for_its_user_alone(tmp_path):
    code = """
import os, sys
from pathlib import Path
from vllm_k25_instrument.instances import create_instance, open_instance
from tests.unit.test_report_rings import open_rank
os.umask(0)
instance, _ = create_instance(Path(sys.argv[1]) / "rings", 1)
open_rank(open_instance(Path(sys.argv[1]) / "rings", instance.name).path, 0, 1).write()
"""
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    left = [tmp_path / "rings", *(tmp_path / "rings").rglob("*")]
    assert len(left) == 4
    assert {path.name for path in left if path.stat().st_mode & 0o077} == set()


# --- the exporter ----------------------------------------------------------------------------------------------


def test_the_exporter_is_seen_by_this_machine_alone_unless_told_otherwise(tmp_path):
    assert Settings.model_fields["export_host"].default == "127.0.0.1"
    program = [sys.executable, "-m", "vllm_k25_instrument.cli", "export", "--port", "0", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("K25_")}
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as exporter:
        try:
            port = int(re.search(rb"http://127\.0\.0\.1:(\d+)/metrics", exporter.stdout.readline())[1])
            listening = [
                fields[1].split(":")[0]
                for table in ("tcp", "tcp6")
                for fields in map(str.split, Path(f"/proc/{exporter.pid}/net/{table}").read_text().splitlines()[1:])
                if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")
            ]
            assert listening == ["0100007F"]
        finally:
            exporter.terminate()


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
        b"DELETE / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics?name[]=" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00\xff\x1b[31m\r\n\r\n",
        b"GET /" + b"a" * 100_000,
    ],
    ids=["post", "delete", "path", "long query", "bytes", "long line"],
)
def test_the_exporter_knows_metrics_and_nothing_else_whatever_it_is_asked(tmp_path, request_):
    open_rank(tmp_path / "20260101T000000-1", 0, 1).write()
    with serving(tmp_path, "127.0.0.1", 0) as url:
        port = int(url.rsplit(":", 1)[1].split("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            answer = b""
            with suppress(OSError):  # it may hang up before it has heard all
                connection.sendall(request_)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.makefile("rb").read()
        assert b"root:" not in answer
        assert registry_of(tmp_path)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b"vllm_k25_steps_total" in connection.makefile("rb").read()


# --- OTLP ------------------------------------------------------------------------------------------------------


def test_a_collectors_answer_is_one_line_of_text_in_the_log_and_no_password_is_in_it(tmp_path):
    open_rank(tmp_path / "20260101T000000-1", 0, 1).write()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(400, "\x1b[31mno")
            self.end_headers()
            self.wfile.write(b"\x1b[2J\nK25: all is well")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = {"http/protobuf": server.server_port, "grpc": 9}
        for protocol, port in where.items():
            environment = {
                "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://user:s3cret@127.0.0.1:{port}",
                "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20t0ken",
                "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
            }
            result = subprocess.run(
                [sys.executable, "-m", "vllm_k25_instrument.cli", "export", str(tmp_path), "--once", "--otlp"],
                env=os.environ | environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            said = result.stdout + result.stderr
            assert result.returncode == 1
            assert "OTLP: pushing metrics" in said
            assert not OBEYED.findall(said)
            assert "all is well" not in said
            assert "s3cret" not in said
            assert "t0ken" not in said
        server.shutdown()
