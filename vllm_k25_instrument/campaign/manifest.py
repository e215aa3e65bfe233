"""``manifest.json`` of a campaign: what was asked for, on what it ran, and what became of every step."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

from vllm_k25_instrument.campaign.errors import CampaignError
from vllm_k25_instrument.campaign.files import write_bytes, write_json

SCHEMA: Final = "vllm_k25.campaign/1"
MANIFEST: Final = "manifest.json"
_RESERVE: Final = ".reserve"
_RESERVED: Final = 256 * 1024
"""Bytes set aside while a campaign runs, so that a full disk leaves room for the manifest that says so."""

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class State(StrEnum):
    """What became of a step. A step found `running` was cut off, and is done again."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    NOT_POSSIBLE = "not_possible"


class Phase(StrEnum):
    """The three phases."""

    MACRO = "macro"
    MICRO = "micro"
    NSYS = "nsys"


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for. `tokenizer` and `config` are empty where nothing was named; `gpu` where no floors are."""

    model: str
    concurrency: tuple[int, ...]
    windows: int = 3
    requests_per_client: int = 4
    input_tokens: int = 32
    output_tokens: int = 128
    client: str = "auto"
    tokenizer: str = ""
    trust_remote_code: bool = False
    gpu: str = ""
    config: str = ""
    context: float | None = None
    link: str = "auto"
    micro: bool = True


@dataclass(slots=True)
class StepRecord:
    """One step. `files` are relative to the campaign's folder; `note` is what there is to know of a step that is done.

    `error` says in one line why a step failed or is not possible.
    """

    name: str
    phase: Phase
    state: State = State.PENDING
    started: str = ""
    seconds: float = 0.0
    files: list[str] = field(default_factory=list)
    error: str = ""
    note: str = ""


@dataclass(slots=True)
class Manifest:
    """The document. `command_lines` has one for each time that the campaign was run or gone on with.

    `stopped` says why the last time ended before its end.
    """

    plan: Plan
    url: str = ""
    created: str = ""
    stopped: str = ""
    command_lines: list[list[str]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)

    def step(self, name: str, phase: Phase) -> StepRecord:
        """The record of a step, made where it is not there yet."""
        for record in self.steps:
            if record.name == name:
                return record
        self.steps.append(StepRecord(name, phase))
        return self.steps[-1]

    def left(self, phase: Phase) -> list[StepRecord]:
        """The steps of a phase that are neither done nor impossible."""
        over = (State.DONE, State.NOT_POSSIBLE)
        return [record for record in self.steps if record.phase is phase and record.state not in over]

    def to_json_dict(self) -> dict[str, Any]:
        """As in the schema of campaigns."""
        return {"schema": SCHEMA, **msgspec.to_builtins(self)}

    def save(self, folder: Path) -> None:
        """Write it. Raises OSError; on a full disk it is written all the same, into the space that was set aside."""
        try:
            write_json(folder / MANIFEST, self.to_json_dict())
        except OSError as error:
            if error.errno in FULL:
                give_up_reserve(folder)
                write_json(folder / MANIFEST, self.to_json_dict())
            raise


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the campaign in `folder`. Raises CampaignError where there is none that can be read."""
    path = folder / MANIFEST
    try:
        document = msgspec.json.decode(path.read_bytes())
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            raise CampaignError(f"{path}: not a manifest of schema {SCHEMA}")
        return msgspec.convert(document, Manifest)
    except FileNotFoundError:
        raise CampaignError(f"{folder}: no campaign here ({MANIFEST} is missing)") from None
    except OSError as error:
        raise CampaignError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CampaignError(f"{path}: damaged: {error}") from error


def reserve(folder: Path) -> None:
    """Set space aside for the manifest. Raises OSError."""
    write_bytes(folder / _RESERVE, bytes(_RESERVED))


def give_up_reserve(folder: Path) -> None:
    """Free the space set aside."""
    with contextlib.suppress(OSError):
        (folder / _RESERVE).unlink()


def now() -> str:
    """The time, in seconds, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
