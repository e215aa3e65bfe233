"""The server that is measured, over HTTP: its models, its metrics, its profiler."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from vllm_k25_instrument.campaign.errors import CampaignError, ServerGoneError

_TIMEOUT_S: Final = 30.0


def authorization() -> dict[str, str]:
    """The header of a server with --api-key: its key is in OPENAI_API_KEY, as for vLLM's own benchmark."""
    key = os.environ.get("OPENAI_API_KEY", "")
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the server says of the model. `root` is the path or name that it was loaded from."""

    name: str
    root: str
    max_length: int | None
    version: str


class Server:
    """An OpenAI-compatible server at a base URL."""

    def __init__(self, url: str) -> None:
        """Raises CampaignError where `url` is none."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CampaignError(f"--url {url}: not a URL such as http://127.0.0.1:8000")
        self.url = parts.geturl().rstrip("/").removesuffix("/v1")
        self.host = parts.hostname
        # No proxies: the server is on this machine or beside it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str, *, post: dict[str, Any] | None = None, timeout: float = _TIMEOUT_S) -> tuple[int, str]:
        """Status and body of an answer. Raises ServerGoneError where there is none."""
        data = None if post is None else json.dumps(post).encode()
        request = urllib.request.Request(  # noqa: S310 (http and https only, see above)
            f"{self.url}{path}", data=data, headers={"Content-Type": "application/json", **authorization()}
        )
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                return int(answer.status), answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(errors="replace")
        except TimeoutError as error:
            raise ServerGoneError(f"the server did not answer {path} within {timeout:.0f} s") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise ServerGoneError(
                f"no server at {self.url} ({why}): start `vllm serve`, or correct --url, then go on with --resume"
            ) from error

    def model(self, wanted: str) -> ModelFacts:
        """The model called `wanted`. Raises CampaignError where it is not served, with the names that are."""
        status, text = self.ask("/v1/models")
        if status in (401, 403):
            raise CampaignError(f"{self.url} asks for a key (/v1/models answers {status}): set OPENAI_API_KEY")
        try:
            models = {str(model["id"]): model for model in json.loads(text)["data"]} if status == 200 else {}
        except (ValueError, LookupError, TypeError):
            models = {}
        if not models:
            raise CampaignError(f"{self.url}/v1/models answers {status} and lists no model: is this an OpenAI server?")
        if wanted not in models:
            raise CampaignError(f"--model {wanted}: the server has no such model; it serves {', '.join(models)}")
        found = models[wanted]
        length = found.get("max_model_len")
        return ModelFacts(
            name=wanted,
            root=str(found.get("root") or wanted),
            max_length=length if isinstance(length, int) else None,
            version=self._version(),
        )

    def _version(self) -> str:
        status, text = self.ask("/version")
        try:
            return str(json.loads(text)["version"]) if status == 200 else ""
        except (ValueError, LookupError, TypeError):
            return ""

    def metrics(self) -> str | None:
        """The text of ``/metrics``, None where the server has none."""
        status, text = self.ask("/metrics")
        return text if status == 200 else None
