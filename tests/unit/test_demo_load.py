"""The load generator against a small completions endpoint: failures are counted, not raised."""

import asyncio
import http.server
import json
import threading
import time

import pytest

httpx = pytest.importorskip("httpx")

from vllm_k25_instrument.demo.load import RequestResult, run_load  # noqa: E402


class Endpoint(http.server.ThreadingHTTPServer):
    """Answers completions; keeps the bodies it got and the most requests it had at once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict] = []
        self.failing_prompts: set[str] = set()
        self.tokens_short = 0
        self.error_in_stream = False
        self.lock = threading.Lock()
        self.open = 0
        self.most_open = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Endpoint

    def log_message(self, *args) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        endpoint = self.server
        with endpoint.lock:
            endpoint.bodies.append(body)
            endpoint.open += 1
            endpoint.most_open = max(endpoint.most_open, endpoint.open)
        threading.Event().wait(0.02)
        # Before the answer: its end is when the client sends the next one.
        with endpoint.lock:
            endpoint.open -= 1
        if body["prompt"] in endpoint.failing_prompts:
            self.send_error(500, "on purpose")
            return
        ids = list(range(body["max_tokens"] - endpoint.tokens_short))
        self.send_response(200)
        self.end_headers()
        if not body["stream"]:
            self.wfile.write(json.dumps({"choices": [self.choice(ids)]}).encode())
            return
        events = [{"choices": [self.choice([n])]} for n in ids]
        if endpoint.error_in_stream:
            events[1:] = [{"error": {"message": "engine died"}}]
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    @staticmethod
    def choice(ids: list[int]) -> dict:
        return {
            "text": "".join(f"<{n}>" for n in ids),
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-1.0] * len(ids)},
        }


@pytest.fixture
def endpoint():
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def load(endpoint: Endpoint, **arguments):
    given = {"concurrency": 2, "requests": 4, "max_tokens": 5, "prompts": ("a", "b"), **arguments}
    return asyncio.run(run_load(endpoint.url, "tiny", **given))


@pytest.mark.parametrize("stream", [True, False])
def test_every_request_is_answered_with_its_tokens_in_order(endpoint, stream):
    result = load(endpoint, stream=stream)
    assert [request.index for request in result.requests] == [0, 1, 2, 3]
    assert [request.prompt for request in result.requests] == ["a", "b", "a", "b"]
    assert {request.token_ids for request in result.requests} == {(0, 1, 2, 3, 4)}
    assert {request.text for request in result.requests} == {"<0><1><2><3><4>"}
    assert result.failed == 0
    assert result.tokens == 20
    assert result.tokens_per_second == pytest.approx(20 / result.wall_s)


def test_requests_are_greedy_and_never_end_early(endpoint):
    load(endpoint)
    for body in endpoint.bodies:
        assert (body["temperature"], body["ignore_eos"], body["max_tokens"]) == (0, True, 5)


def test_never_more_requests_are_open_than_the_concurrency_says(endpoint):
    load(endpoint, concurrency=3, requests=12)
    assert endpoint.most_open == 3


def test_log_probabilities_come_where_they_are_asked_for(endpoint):
    assert load(endpoint, log_probabilities=True).requests[0].log_probabilities == (-1.0,) * 5
    assert endpoint.bodies[0]["logprobs"] == 1


def test_a_failed_request_is_counted_and_the_others_go_on(endpoint):
    endpoint.failing_prompts = {"b"}
    result = load(endpoint)
    assert result.failed == 2
    assert [bool(request.error) for request in result.requests] == [False, True, False, True]
    assert "HTTP 500" in result.errors[0]
    assert len(result.errors) == 1, "equal errors are listed once"


def test_too_few_tokens_are_a_failure(endpoint):
    endpoint.tokens_short = 1
    assert load(endpoint).errors == ["4 tokens instead of 5"]


def test_an_error_in_the_middle_of_a_stream_is_a_failure(endpoint):
    endpoint.error_in_stream = True
    assert "engine died" in load(endpoint).errors[0]


def test_a_server_that_is_gone_fails_every_request_without_raising():
    result = asyncio.run(run_load("http://127.0.0.1:9", "tiny", concurrency=2, requests=3, max_tokens=2))
    assert result.failed == 3
    assert result.tpot_s is None
    assert result.tokens_per_second == 0.0


def test_time_per_output_token_leaves_out_the_first_where_that_was_seen():
    streamed = RequestResult(0, "p", token_ids=(1, 2, 3), first_token_s=1.0, latency_s=1.2)
    whole = RequestResult(0, "p", token_ids=(1, 2, 3), latency_s=1.2)
    assert streamed.seconds_per_token == pytest.approx(0.1)
    assert whole.seconds_per_token == pytest.approx(0.4)
    assert RequestResult(0, "p", error="x").seconds_per_token is None


def test_a_load_begins_with_its_first_request_however_long_the_client_takes_to_make(endpoint, monkeypatch):
    """The samples of a window are those between its begin and its end."""
    made: list[int] = []

    class Slow(httpx.AsyncClient):
        def __init__(self, **kwargs):
            time.sleep(0.3)
            super().__init__(**kwargs)
            made.append(time.time_ns())

    monkeypatch.setattr(httpx, "AsyncClient", Slow)
    result = asyncio.run(run_load(endpoint.url, "m", concurrency=1, requests=2, max_tokens=2))
    assert made[0] <= result.began_unix_ns <= time.time_ns() - round(result.wall_s * 1e9)
