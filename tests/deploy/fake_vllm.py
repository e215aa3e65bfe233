"""Stands for `vllm serve`: says how it was started, answers /health after a while, and takes its time to end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

LOG = Path(os.environ["FAKE_LOG"])
SAID = ("K25_", "VLLM_")


def log(text: str) -> None:
    with LOG.open("a") as file:
        file.write(text + "\n")


def main() -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith(SAID)}
    log("vllm " + json.dumps({"arguments": sys.argv[1:], "environment": environment, "pid": os.getpid()}))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        log("vllm was started with SIGINT ignored")
    if os.environ.get("FAKE_VLLM_FAILS"):
        sys.exit("no such model")
    asked, not_ready = 0, int(os.environ.get("FAKE_VLLM_NOT_READY", "0"))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal asked
            asked += 1
            ready = self.path == "/health" and asked > not_ready
            log(f"health {200 if ready else 503}")
            self.send_response(200 if ready else 503)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = HTTPServer(("127.0.0.1", port), Handler)

    def end(number: int, _frame: object) -> None:
        log(f"vllm got {signal.Signals(number).name}")
        if number == signal.SIGINT and os.environ.get("FAKE_VLLM_HANGS"):
            return
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    server.serve_forever(poll_interval=0.05)
    time.sleep(0.1)
    log("vllm ended")


if __name__ == "__main__":
    main()
