"""What if: the step time that a change would leave, from the time that each category is exposed for.

Exposed time is what a category adds to the step, so what is won there is won: predicted step = measured step - exposed
time of the changed categories + their new time. Everything else is taken to stay as it is. Times are ns, means per step
over the ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from vllm_k25_instrument.limits.batches import Batches, Measured, loads_of
from vllm_k25_instrument.limits.floors import Bound, Floor, Load, mean_floors
from vllm_k25_instrument.limits.machine import Machine
from vllm_k25_instrument.model import ALL_REDUCE_PATHS, Category, Phase
from vllm_k25_instrument.report.breakdown import category_order
from vllm_k25_instrument.report.compare import Side, Steps
from vllm_k25_instrument.report.digest import GroupKey
from vllm_k25_instrument.report.figures import microseconds

SCHEMA: Final = "vllm_k25.whatif/1"

_FACTOR: Final = re.compile(r"[xX\u00d7]\s*(\d+(?:\.\d+)?|\.\d+)")


class WhatIfError(ValueError):
    """A change that cannot be predicted. The message says why, and what would make it possible."""


class Kind(StrEnum):
    """How a change is given."""

    PATH = "path"
    FACTOR = "factor"
    FLOOR = "floor"


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to one category: multiplied by `factor`, set to its floor, or all-reduces through another `path`."""

    category: Category
    kind: Kind
    factor: float = 1.0
    path: str = ""

    @classmethod
    def parse(cls, category: Category, text: str) -> Change:
        """``x0.5``, ``floor``, and of all-reduce ``path=NAME``. Raises WhatIfError on anything else."""
        written = text.strip()
        if written == Kind.FLOOR:
            return cls(category, Kind.FLOOR)
        factor = _FACTOR.fullmatch(written)
        if factor is not None:
            return cls(category, Kind.FACTOR, factor=float(factor[1]))
        if category is Category.ALL_REDUCE and written.startswith("path="):
            path = written.removeprefix("path=")
            if path not in ALL_REDUCE_PATHS:
                raise WhatIfError(f"path={path}: no such path; known are {', '.join(ALL_REDUCE_PATHS)}")
            return cls(category, Kind.PATH, path=path)
        ways = ["floor", "x0.5 (any factor)", *(["path=NAME"] if category is Category.ALL_REDUCE else [])]
        raise WhatIfError(f"{text!r}: allowed are {', '.join(ways)}")

    @property
    def assumption(self) -> str:
        """The change in words."""
        if self.kind is Kind.FACTOR:
            return f"{self.category} takes {self.factor:g} times as long as measured."
        if self.kind is Kind.FLOOR:
            return f"{self.category} takes its physical floor, which nothing reaches: an upper bound of the gain."
        return (
            f"Every all-reduce takes as long as the measured mean of path {self.path} at its size, waiting for the "
            "slowest rank included; exposed time changes in proportion."
        )


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: of `drafts` draft tokens per request and step, `accepted` are accepted in the mean.

    `draft_ns` is the drafter's own time per step. Raises WhatIfError where more are accepted than drafted.
    """

    accepted: float
    drafts: int
    draft_ns: float = 0.0

    @classmethod
    def of(cls, accepted: float, drafts: int | None = None, draft_us: float = 0.0) -> Speculation:
        """By default as few drafts as that many accepted ones take."""
        count = max(math.ceil(accepted), 1) if drafts is None else drafts
        if not 0 <= accepted <= count:
            raise WhatIfError(f"--spec-decode {accepted:g}: of {count} drafts 0 to {count} are accepted")
        return cls(accepted, count, draft_us * 1000)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The cost model in words."""
        drafter = (
            f"the drafter takes {microseconds(self.draft_ns)} µs a step (--draft-us)"
            if self.draft_ns
            else "the drafter's own time is not in it (--draft-us adds it)"
        )
        noun = "draft" if self.drafts == 1 else "drafts"
        tokens = (
            f"A step verifies {self.drafts} {noun} per request, of which {self.accepted:g} are accepted: "
            f"{1 + self.accepted:g} tokens per request and step; {drafter}."
        )
        cost = (
            f"The verified batch has {1 + self.drafts} times the tokens. What is bound by memory or compute grows in "
            "proportion to its floor (more distinct experts; the cache is read once per request), an all-reduce by as "
            "much as its floor does (its latency stays), sampling with the tokens; the rest stays."
        )
        return tokens, cost

    def verified(self, load: Load) -> Load:
        """The load of a step that verifies drafts."""
        return replace(load, tokens=load.tokens * (1 + self.drafts))


@dataclass(frozen=True, slots=True)
class Evidence:
    """What there is to predict from beside the breakdown: rings, and floors."""

    measured: Measured | None = None
    machine: Machine | None = None

    def floors(self, key: GroupKey, speculation: Speculation | None = None) -> dict[str, Floor]:
        """The floors of a decode group. Raises WhatIfError where there are none."""
        if self.machine is None:
            raise WhatIfError("a floor needs --gpu, --config and --context")
        if key.phase != Phase.DECODE:
            raise WhatIfError("only decode steps have floors: what the others attend to is not recorded")
        machine = self.machine
        loads, _ = loads_of(self._groups, key, machine.context)
        if speculation is not None:
            loads = {speculation.verified(load): share for load, share in loads.items()}
        return mean_floors(loads, machine.shape, machine.sharding, machine.gpu, machine.link)

    def requests(self, key: GroupKey) -> float | None:
        """Mean requests of the group's steps, None where only the label is known."""
        batches = self._groups.get(key)
        return batches.mean()[0] if batches is not None and batches.steps else None

    @property
    def _groups(self) -> Mapping[GroupKey, Batches]:
        return {} if self.measured is None else self.measured.groups


@dataclass(frozen=True, slots=True)
class Row:
    """One category before and after, ns per step, and why it changes (empty: it does not)."""

    name: str
    measured_ns: float
    predicted_ns: float
    reason: str = ""

    def to_json_dict(self) -> dict[str, Any]:
        """Rounded to the nanosecond."""
        return {
            "measured_ns": round(self.measured_ns),
            "predicted_ns": round(self.predicted_ns),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Prediction:
    """One group of steps. The rows add up to the step, before and after."""

    key: GroupKey
    steps: int
    rows: tuple[Row, ...]
    tokens_per_request: float = 1.0
    requests: float | None = None

    @property
    def title(self) -> str:
        """``decode · batch 64 · full graph``."""
        return self.key.title

    @property
    def measured_ns(self) -> float:
        """The step as measured."""
        return sum(row.measured_ns for row in self.rows)

    @property
    def predicted_ns(self) -> float:
        """The step as predicted."""
        return sum(row.predicted_ns for row in self.rows)

    @property
    def predicted_token_ns(self) -> float:
        """Time per output token of a request; measured it is the step's."""
        return self.predicted_ns / self.tokens_per_request

    @property
    def speedup(self) -> float | None:
        """How many times as many tokens per second; None where nothing would be left of the step."""
        return self.measured_ns / self.predicted_token_ns if self.predicted_ns > 0 else None

    def to_json_dict(self) -> dict[str, Any]:
        """One entry of ``groups``."""
        return {
            "phase": str(self.key.phase),
            "batch": self.key.batch,
            "graph_mode": str(self.key.graph_mode),
            "steps": self.steps,
            "requests": self.requests,
            "step_ns": {"measured": round(self.measured_ns), "predicted": round(self.predicted_ns)},
            "tokens_per_request": self.tokens_per_request,
            "time_per_output_token_ns": {
                "measured": round(self.measured_ns),
                "predicted": round(self.predicted_token_ns),
            },
            "speedup": None if self.speedup is None else round(self.speedup, 4),
            "categories": {row.name: row.to_json_dict() for row in self.rows},
        }


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The predictions, what they assume, and which groups none could be made of, with the reason."""

    name: str
    complete: bool
    predictions: tuple[Prediction, ...]
    assumptions: tuple[str, ...]
    refused: tuple[tuple[GroupKey, str], ...] = ()

    def to_json_dict(self) -> dict[str, Any]:
        """The document of schema ``vllm_k25.whatif/1``."""
        return {
            "schema": SCHEMA,
            "of": self.name,
            "complete": self.complete and not self.refused,
            "assumptions": list(self.assumptions),
            "groups": [prediction.to_json_dict() for prediction in self.predictions],
            "refused": [
                {"phase": str(key.phase), "batch": key.batch, "graph_mode": str(key.graph_mode), "reason": reason}
                for key, reason in self.refused
            ],
        }


def what_if(
    side: Side, changes: Sequence[Change], speculation: Speculation | None = None, evidence: Evidence | None = None
) -> WhatIf:
    """Predict every group of `side`. A group that the evidence does not suffice for is refused, never guessed."""
    there = evidence or Evidence()
    predictions, refused = [], []
    decode_only = _needs_floors(changes, speculation) and any(key.phase == Phase.DECODE for key in side.groups)
    for key, steps in side.groups.items():
        if decode_only and key.phase != Phase.DECODE:
            continue
        try:
            predictions.append(_predict(key, steps, side.is_live, changes, speculation, there))
        except WhatIfError as error:
            refused.append((key, str(error)))
    return WhatIf(
        name=side.name,
        complete=side.complete,
        predictions=tuple(predictions),
        assumptions=tuple(_assumptions(changes, speculation, there)),
        refused=tuple(refused),
    )


def _needs_floors(changes: Sequence[Change], speculation: Speculation | None) -> bool:
    return speculation is not None or any(change.kind is Kind.FLOOR for change in changes)


def _assumptions(changes: Sequence[Change], speculation: Speculation | None, evidence: Evidence) -> Iterator[str]:
    yield (
        "Predicted step = measured step, with the exposed time of what changes replaced; the rest is taken to stay as "
        "long as it is, and what now hides behind a changed category to stay hidden."
    )
    yield from (change.assumption for change in changes)
    if speculation is not None:
        yield from speculation.assumptions
    if _needs_floors(changes, speculation):
        yield "Only decode steps are predicted: what the others attend to, and so their floor, is not recorded."
        if evidence.machine is not None:
            yield from evidence.machine.assumptions


def _predict(
    key: GroupKey,
    steps: Steps,
    live: bool,
    changes: Sequence[Change],
    speculation: Speculation | None,
    evidence: Evidence,
) -> Prediction:
    rest = str(Category.UNATTRIBUTED) if live else "idle"
    times = dict(sorted(steps.by_category.items(), key=lambda item: category_order(item[0])))
    times[rest] = times.get(rest, 0.0) + steps.rest_ns
    rows = {name: Row(name, ns, ns) for name, ns in times.items()}
    for change in changes:
        name = str(change.category)
        if name not in rows:
            raise WhatIfError(f"there is no {name} in these steps")
        rows[name] = _changed(rows[name], change, key, evidence)
    made = list(rows.values())
    if speculation is not None:
        made = list(_speculated(made, speculation, key, evidence))
    return Prediction(
        key=key,
        steps=steps.steps,
        rows=tuple(made),
        tokens_per_request=1 + speculation.accepted if speculation is not None else 1.0,
        requests=evidence.requests(key),
    )


def _changed(row: Row, change: Change, key: GroupKey, evidence: Evidence) -> Row:
    if change.kind is Kind.FACTOR:
        return replace(row, predicted_ns=row.measured_ns * change.factor, reason=f"x{change.factor:g}")
    if change.kind is Kind.PATH:
        factor, reason = _path_factor(change.path, key, evidence)
        return replace(row, predicted_ns=row.measured_ns * factor, reason=reason)
    floor = evidence.floors(key).get(row.name)
    if floor is None:
        raise WhatIfError(f"{row.name} has no floor for this model: nothing must move for it")
    if floor.ns > row.measured_ns:
        return replace(row, reason=f"already below its floor of {microseconds(floor.ns)} µs")
    return replace(row, predicted_ns=floor.ns, reason=f"floor ({floor.bound})")


def _path_factor(path: str, key: GroupKey, evidence: Evidence) -> tuple[float, str]:
    """New over old sum of the group's all-reduces, each at the path's mean for its size, and where it is from."""
    measured = evidence.measured
    if measured is None:
        raise WhatIfError(f"path={path} needs the rings: a breakdown's JSON does not tell all-reduces apart by path")
    batches = measured.groups.get(key)
    if batches is None or not batches.all_reduces:
        raise WhatIfError("no all-reduce was timed in these steps")
    old = new = 0.0
    means = {}
    for (_, size), calls in sorted(batches.all_reduces.items()):
        mean = measured.path_ns(path, size)
        if mean is None:
            there = ", ".join(measured.paths) or "none"
            raise WhatIfError(
                f"path {path} was not measured at messages up to {size} bytes (measured paths: {there}): run a server "
                f"that takes it at this size, or give a factor (x0.5)"
            )
        means[size] = mean
        old += calls.sum_ns
        new += calls.count * mean
    if not old:
        raise WhatIfError("the all-reduces of these steps took no time")
    each = ", ".join(f"{microseconds(mean)} µs up to {size} bytes" for size, mean in means.items())
    return new / old, f"{path}: {each}"


def _speculated(rows: Sequence[Row], speculation: Speculation, key: GroupKey, evidence: Evidence) -> Iterator[Row]:
    own, verified = evidence.floors(key), evidence.floors(key, speculation)
    for row in rows:
        before, after = own.get(row.name), verified.get(row.name)
        if row.name == Category.SAMPLING:
            yield _longer(row, row.predicted_ns * (1 + speculation.drafts), f"x{1 + speculation.drafts} tokens")
        elif before is None or after is None or not before.ns:
            yield row
        elif before.bound is Bound.LINK:
            grown = after.ns - before.ns
            yield _longer(row, row.predicted_ns + grown, f"+{microseconds(grown)} µs of its floor")
        else:
            factor = after.ns / before.ns
            yield _longer(row, row.predicted_ns * factor, f"x{factor:.3g} of its floor") if factor > 1 else row
    if speculation.draft_ns:
        yield Row("drafter", 0.0, speculation.draft_ns, "--draft-us")


def _longer(row: Row, predicted_ns: float, reason: str) -> Row:
    return replace(row, predicted_ns=predicted_ns, reason=f"{row.reason}; {reason}" if row.reason else reason)
