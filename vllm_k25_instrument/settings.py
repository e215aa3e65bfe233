"""Every setting, typed and documented: environment variables with the prefix ``K25_``.

The README's table of settings is generated from this class (``python -m vllm_k25_instrument.settings``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from vllm_k25_instrument.instances import INSTANCE_VARIABLE, default_ring_directory
from vllm_k25_instrument.model import HOOKED_CATEGORIES, Category
from vllm_k25_instrument.ring import DEFAULT_BYTES, DEFAULT_SAMPLES, MAX_SLOTS, MIN_SLOTS

PREFIX: Final = "K25_"
_DEMO_PREFIX: Final = "K25_DEMO_"
_MAX_SHOWN: Final = 80


class SettingsError(Exception):
    """Settings that cannot be used. The message is one line: variable, value, and what is allowed."""


class Metrics(StrEnum):
    """Where the metrics go."""

    AUTO = "auto"
    OFF = "off"


class GraphTiming(StrEnum):
    """How CUDA graphs are timed."""

    OFF = "off"
    INPLACE = "inplace"
    TWIN = "twin"


class Settings(BaseSettings):
    """Settings of the plugin and of the tools around it. A variable that is set to nothing counts as not set."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, env_ignore_empty=True)

    instrument: bool = Field(False, description="Turn the plugin on. Off, it patches nothing.")
    ring_dir: Path = Field(
        default_factory=default_ring_directory,
        description="Directory of the rings: a folder per server instance, mode 0700. Keep it on a local tmpfs. "
        "Default: `/dev/shm/vllm_k25-<uid>`.",
    )
    ring_samples: int = Field(
        DEFAULT_SAMPLES, ge=MIN_SLOTS, le=MAX_SLOTS, description="Sampled steps that a rank's ring holds at most."
    )
    ring_bytes: int = Field(
        DEFAULT_BYTES,
        ge=64 * 1024,
        le=16 * 1024**3,
        description="Bytes of samples that a rank's ring holds at most. Divided by `K25_RING_SAMPLES` this is the "
        "room for one step: at the defaults 509 ranges.",
    )
    ring_keep: int = Field(
        1, ge=0, le=1000, description="Dead instances whose rings the next start leaves in place (the flight recorder)."
    )
    sample_every: int = Field(
        16,
        ge=1,
        le=1_000_000,
        description="Sample every Nth step: those whose number is a multiple of N, on all ranks.",
    )
    categories: Annotated[frozenset[Category], NoDecode] = Field(
        frozenset(HOOKED_CATEGORIES),
        description="Categories to hook, separated by commas, or `all`. What is left out counts as `unattributed`.",
    )
    graphs: GraphTiming = Field(
        GraphTiming.TWIN,
        description="How CUDA graphs are timed. `twin`: a second, instrumented set is replayed in sampled steps, all "
        "others replay vLLM's own, untouched. `inplace`: vLLM's own carry the events on every replay (for nsys "
        "sessions). `off`: steps that replay a graph have a duration only.",
    )
    graph_sizes: Annotated[frozenset[int] | None, NoDecode] = Field(
        None,
        description="Decode graph sizes (tokens) to make twins of, separated by commas, or `all`. Fewer sizes cost "
        "less memory and start-up time; steps of other sizes have a duration only.",
    )
    nvtx: bool = Field(True, description="Emit NVTX ranges in sampled steps (nothing happens without a tool attached).")
    metrics: Metrics = Field(
        Metrics.AUTO, description="`auto`: in vLLM's own `/metrics` where that is possible. `off`."
    )
    export_host: str = Field("127.0.0.1", description="Address that `vllm-k25 export` listens on.")
    export_port: int = Field(9425, ge=0, le=65_535, description="Port that `vllm-k25 export` listens on; 0 picks one.")

    @field_validator("ring_dir")
    @classmethod
    def _make_absolute(cls, value: Path) -> Path:
        """Processes of one server need not share a working directory."""
        try:
            return value.expanduser().absolute()
        except (RuntimeError, OSError) as error:  # ~somebody, or relative to a folder that is gone
            raise ValueError(f"must be the path of a directory ({error})") from None

    @field_validator("graph_sizes", mode="before")
    @classmethod
    def _split_sizes(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value.strip() == "all":
            return None
        try:
            sizes = frozenset(int(size) for size in value.split(",") if size.strip())
        except ValueError:
            sizes = frozenset()
        if not sizes or min(sizes) < 1:
            raise ValueError("allowed: all, or positive whole numbers separated by commas")
        return sizes

    @field_validator("categories", mode="before")
    @classmethod
    def _split_categories(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        names = {name.strip() for name in value.split(",") if name.strip()}
        unknown = sorted(names.difference(HOOKED_CATEGORIES, ("all",)))
        if unknown or not names:
            wrong = f"unknown {', '.join(unknown)}" if unknown else "none named"
            raise ValueError(f"{wrong}; allowed: all, {', '.join(HOOKED_CATEGORIES)}")
        return frozenset(HOOKED_CATEGORIES if "all" in names else map(Category, names))


def load_settings(**overrides: Any) -> Settings:
    """Read the settings from the environment. Raises SettingsError, with one line, on the first wrong value."""
    try:
        return Settings(**overrides)
    except ValidationError as error:
        raise SettingsError("; ".join(_describe(detail) for detail in error.errors()[:3])) from None


def unknown_variables(environ: Iterable[str]) -> dict[str, str | None]:
    """Variables with our prefix that nothing reads, each with the setting that it may have been meant to be."""
    known = [name.upper() for name in Settings.model_fields]
    unknown = sorted(
        name
        for name in environ
        if name.startswith(PREFIX)
        and name.upper().removeprefix(PREFIX) not in known
        and name != INSTANCE_VARIABLE
        and not name.startswith(_DEMO_PREFIX)
    )
    close = {name: difflib.get_close_matches(name.upper().removeprefix(PREFIX), known, n=1) for name in unknown}
    return {name: PREFIX + meant[0] if meant else None for name, meant in close.items()}


def _describe(detail: Any) -> str:
    """One line of what is wrong: variable, value, what is allowed."""
    name = str(detail["loc"][0]) if detail["loc"] else ""
    value = repr(detail["input"])
    shown = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}…"
    wrong = str(detail["msg"]).removeprefix("Value error, ")
    return f"{PREFIX}{name.upper()}={shown}: {_allowed(name) or wrong}"


def _allowed(name: str) -> str:
    """What the setting may be, "" where its own check says so."""
    field = Settings.model_fields.get(name)
    if field is None:
        return ""
    kind = field.annotation
    if kind is bool:
        return "must be 1 or 0 (or true, false, yes, no, on, off)"
    if kind is int:
        bounds = {type(bound).__name__: bound for bound in field.metadata}
        return f"must be a whole number from {bounds['Ge'].ge} to {bounds['Le'].le}"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return f"must be one of: {', '.join(kind)}"
    return ""


def settings_table() -> str:
    """The table of settings as Markdown."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        lines.append(f"| `{PREFIX}{name.upper()}` | {_default(name, field.default)} | {field.description} |")
    return "\n".join(lines)


def _default(name: str, value: object) -> str:
    if name == "ring_dir":
        return "see there"
    if name in ("categories", "graph_sizes"):
        return "`all`"
    return f"`{int(value) if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(settings_table())  # noqa: T201
