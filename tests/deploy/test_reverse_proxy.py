"""nginx in front of the exporter asks for a password, over TLS, and shows nothing else."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from tests.deploy.deployments import DEPLOY
from tests.export_rings import EXPORT, make_ring, touch_everything
from tests.exposition import our_samples

CONFIGURATION = DEPLOY / "systemd" / "vllm-k25-export.nginx.conf"
USER, PASSWORD = "prometheus", "a-password"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def nginx(program):
    for folder in ("/usr/sbin", "/usr/local/sbin"):
        if path := shutil.which("nginx", path=folder):
            return path
    return program("nginx", "Debian package: nginx-light", in_ci=False)


@pytest.fixture(scope="module")
def openssl(program):
    return program("openssl", "Debian package: openssl", in_ci=False)


@pytest.fixture(scope="module")
def url(nginx, openssl, tmp_path_factory):
    """Of nginx with the configuration as it is, but for ports and paths, and a real exporter behind it."""
    folder = tmp_path_factory.mktemp("proxy")
    writer = make_ring(folder / "rings" / "20260101T000000-1")
    touch_everything(writer.totals)
    port = free_port()
    text = CONFIGURATION.read_text().replace("/etc/nginx/", f"{folder}/").replace("9443", str(port))
    text = text.replace(f"    listen [::]:{port} ssl;\n", "")
    _run(
        *[openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"],
        *["-keyout", folder / "vllm-k25.key", "-out", folder / "vllm-k25.crt"],
    )
    hashed = _run(openssl, "passwd", "-apr1", PASSWORD).stdout.strip()
    (folder / "vllm-k25.htpasswd").write_text(f"{USER}:{hashed}\n")
    command = [*EXPORT, str(folder / "rings"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as exporter:
        behind = exporter.stdout.readline().rpartition(":")[2].split("/")[0]
        main = folder / "nginx.conf"
        user = "user root;" if os.getuid() == 0 else ""
        main.write_text(
            f"{user}\ndaemon off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n"
            + "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy"))
            + text.replace("127.0.0.1:9425", f"127.0.0.1:{behind}")
            + "}\n"
        )
        with subprocess.Popen([nginx, "-p", folder, "-c", main], stderr=subprocess.PIPE, text=True) as server:
            _await_port(port, server)
            yield f"https://127.0.0.1:{port}"
            server.terminate()
        exporter.terminate()


def _run(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, timeout=60)


def _await_port(port, server):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert server.poll() is None, server.stderr.read()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.fail("nginx does not listen")


def get(url, password=None, method="GET"):
    """Status and text of an answer."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    request = urllib.request.Request(url, method=method)
    if password is not None:
        credentials = base64.b64encode(f"{USER}:{password}".encode()).decode()
        request.add_header("Authorization", f"Basic {credentials}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_with_the_password_it_answers_with_the_metrics(url):
    status, text = get(f"{url}/metrics", PASSWORD)
    assert status == 200
    assert our_samples(text)


@pytest.mark.parametrize("password", [None, "", "another"])
def test_without_the_password_it_does_not(url, password):
    assert get(f"{url}/metrics", password) == (401, "")


def test_there_is_nothing_but_the_metrics(url):
    assert get(f"{url}/", PASSWORD)[0] == 404
    assert get(f"{url}/metrics", PASSWORD, method="POST")[0] == 403


def test_without_tls_it_does_not_answer(url):
    assert get(url.replace("https", "http") + "/metrics", PASSWORD)[0] == 400
