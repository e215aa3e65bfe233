"""A real headless Chromium, driven through its debugging pipe: no driver, no port, no library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT_S = 60

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """The program, or None where there is no Chromium."""
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


class Browser:
    """One page of one browser."""

    def __init__(self, write: int, read: int) -> None:
        self._write = write
        self._read = read
        self._buffer = b""
        self._next = 0
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = ""
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if getattr(self, "_session", ""):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def show(self, page: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load `page` in a window of this width, in CSS pixels; below 500 it is a phone's."""
        phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.absolute().as_uri())
        end = time.monotonic() + TIMEOUT_S
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") == "about:blank":
            if time.monotonic() > end:
                raise TimeoutError(f"{page} did not load")
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            # Not select(), which knows no descriptor above 1,023.
            waiting = select.poll()
            waiting.register(self._read, select.POLLIN)
            data = os.read(self._read, 1 << 16) if waiting.poll(TIMEOUT_S * 1000) else b""
            if not data:
                raise TimeoutError("Chromium does not answer")
            self._buffer += data
        raw, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(raw)
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(message["params"]["entry"]["text"])
        if message.get("method") == "Runtime.exceptionThrown" or (
            message.get("method") == "Runtime.consoleAPICalled" and message["params"]["type"] in ("error", "assert")
        ):
            self.errors.append(str(message["params"]))
        return message


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """A browser with the fresh profile directory `profile`."""
    to_child, write = os.pipe()
    read, from_child = os.pipe()
    # The pipe's ends must be descriptors 3 and 4 of the child.
    shell = f'exec "$@" 3<&{to_child} 4>&{from_child}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "chromium", program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_child, from_child),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_child)
    os.close(from_child)
    try:
        yield Browser(write, read)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(write)
        os.close(read)
