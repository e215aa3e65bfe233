"""A small OpenAI server: models, streamed completions at a steady pace, metrics; no GPU, no model, no plugin."""

from __future__ import annotations

import http.server
import json
import threading
import time

TOKEN_S = 0.002


class Completions(http.server.ThreadingHTTPServer):
    """Serves `model`. `max_running` requests run at a time, as with vLLM's --max-num-seqs; the others queue.

    `dies_after`: completions after which it stops answering. A context manager.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self,
        model: str = "standin",
        *,
        max_running: int = 64,
        dies_after: int | None = None,
        port: int = 0,
        key: str = "",
    ):
        super().__init__(("127.0.0.1", port), _Handler)
        self.model = model
        self.dies_after = dies_after
        self.key = key
        self.answered = 0
        self.queue_s = 0.0
        self.lock = threading.Lock()
        self.running = threading.Semaphore(max_running)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Completions:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is no concern."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Completions

    def log_message(self, *_: object) -> None:
        pass

    def _refused(self) -> bool:
        """Whether a key is asked for, and this request does not have it."""
        refused = bool(self.server.key) and self.headers["Authorization"] != f"Bearer {self.server.key}"
        if refused:
            self.send_error(401)
        return refused

    def do_GET(self) -> None:
        if self._refused():
            return
        if self.path == "/v1/models":
            model = {"id": self.server.model, "root": f"org/{self.server.model}", "max_model_len": 1024}
            self._answer(json.dumps({"data": [model]}))
        elif self.path == "/version":
            self._answer('{"version": "0.0.0"}')
        elif self.path == "/metrics":
            with self.server.lock:
                total, count = self.server.queue_s, self.server.answered
            name = "vllm:request_queue_time_seconds"
            self._answer(f'{name}_sum{{engine="0"}} {total}\n{name}_count{{engine="0"}} {count}\n')
        else:
            self.send_error(404)

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self._refused():
            return
        if self.path != "/v1/completions":
            self.send_error(404)
            return
        came = time.monotonic()
        with self.server.running:
            waited = time.monotonic() - came
            self.send_response(200)
            self.end_headers()
            for token in range(body["max_tokens"]):
                time.sleep(TOKEN_S)
                choice = {"text": "x", "token_ids": [token]}
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
        with self.server.lock:
            self.server.queue_s += waited
            self.server.answered += 1
            dies = self.server.answered == self.server.dies_after
        if dies:
            # The port closes at once: whoever comes next is refused.
            self.server.socket.close()
