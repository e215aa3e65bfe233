"""Two breakdowns side by side: what changed, by how much, and which category's doing it is.

Both are taken as documents of schema ``vllm_k25.breakdown/1``, so that a ring, a trace and a saved JSON file are one
kind of thing. Times are means per step, over the ranks, ns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_k25_instrument.model import HOOKED_CATEGORIES
from vllm_k25_instrument.report.breakdown import SCHEMA, Source, category_order, group_order
from vllm_k25_instrument.report.digest import GroupKey, graph_text

REST: Final = "idle or unattributed"
"""What is left of a step: idle time in a trace, unattributed time of a live source."""

NO_CHANGE: Final = 0.001
"""Where the whole differs by less than this, nothing is said of who did it: shares of nothing are noise."""

MATTERS: Final = 0.01
"""A category below this share of the step on both sides is shown, but not judged."""


class DocumentError(ValueError):
    """A document that is no breakdown."""


@dataclass(frozen=True, slots=True)
class Steps:
    """A group of comparable steps: means per step, ns. `by_category` and `rest_ns` add up to `step_ns`."""

    steps: int
    step_ns: float
    by_category: Mapping[str, float]
    rest_ns: float


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two breakdowns. `totals`: sums by category of the whole capture, ns; None where there are none."""

    name: str
    source: Source
    complete: bool
    groups: Mapping[GroupKey, Steps]
    totals: Mapping[str, int] | None = None

    @property
    def is_live(self) -> bool:
        """Whether it was measured by hooks: its categories are those that have hooks."""
        return self.source is Source.RING

    @classmethod
    def of(cls, name: str, document: Any) -> Side:
        """The side that `document`, parsed JSON, describes. Raises DocumentError where it is no valid breakdown."""
        try:
            if document["schema"] != SCHEMA:
                raise DocumentError(f"schema {document['schema']!r:.40} instead of {SCHEMA}")
            totals = document.get("totals")
            return cls(
                name=name,
                source=Source(document["source"]),
                complete=document["complete"] is True,
                groups=_groups(document["groups"]),
                totals=None
                if totals is None
                else {str(category): _time(each["sum_ns"]) for category, each in totals["by_category"].items()},
            )
        except DocumentError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DocumentError(f"not a valid breakdown ({type(error).__name__}: {error})") from error


def _time(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise DocumentError(f"{value!r:.40} is no time in nanoseconds")
    return value


def _groups(listed: Sequence[Any]) -> dict[GroupKey, Steps]:
    by_key: dict[GroupKey, list[Steps]] = {}
    for each in listed:
        steps = _time(each["steps"])
        if steps < 1:
            raise DocumentError("a group without a step")
        own = {str(name): _time(time["exclusive_ns"]) for name, time in each["categories"].items()}
        rest = _time(each["unattributed_ns"])
        key = GroupKey(str(each["phase"]), str(each["batch"]), str(each["graph_mode"]))
        whole = sum(own.values()) + rest
        by_key.setdefault(key, []).append(
            Steps(steps, whole / steps, {name: ns / steps for name, ns in own.items()}, rest / steps)
        )
    return {key: _mean(ranks) for key, ranks in by_key.items()}


def _mean(ranks: Sequence[Steps]) -> Steps:
    """Over the ranks; a rank without a category spent no time on it."""
    count = len(ranks)
    names = {name for rank in ranks for name in rank.by_category}
    return Steps(
        steps=max(rank.steps for rank in ranks),
        step_ns=sum(rank.step_ns for rank in ranks) / count,
        by_category={name: sum(rank.by_category.get(name, 0.0) for rank in ranks) / count for name in names},
        rest_ns=sum(rank.rest_ns for rank in ranks) / count,
    )


@dataclass(frozen=True, slots=True)
class Change:
    """One category on both sides, ns. `share` is its part of the whole change (None: next to nothing changed)."""

    name: str
    a_ns: float
    b_ns: float
    share: float | None

    @property
    def difference_ns(self) -> float:
        """How much more B takes."""
        return self.b_ns - self.a_ns

    @property
    def percent(self) -> float | None:
        """The difference in percent of A; None where A has nothing."""
        return 100 * self.difference_ns / self.a_ns if self.a_ns else None

    @property
    def apart_percent(self) -> float:
        """The difference in percent of the larger side, whichever it is."""
        larger = max(abs(self.a_ns), abs(self.b_ns))
        return 100 * abs(self.difference_ns) / larger if larger else 0.0

    def to_json_dict(self) -> dict[str, Any]:
        """Rounded to the nanosecond."""
        return {
            "a_ns": round(self.a_ns),
            "b_ns": round(self.b_ns),
            "difference_ns": round(self.difference_ns),
            "difference_percent": None if self.percent is None else round(self.percent, 3),
            "share_of_change": None if self.share is None else round(self.share, 4),
        }


@dataclass(frozen=True, slots=True)
class GroupChange:
    """A group that both sides have. `step` is the whole step, `rows` its categories: they add up to it."""

    key: GroupKey
    key_b: GroupKey
    a_steps: int
    b_steps: int
    step: Change
    rows: tuple[Change, ...]

    @property
    def title(self) -> str:
        """``decode · batch 64 · full graph``."""
        same = self.key_b.graph_mode == self.key.graph_mode
        return self.key.title if same else f"{self.key.title} / {graph_text(self.key_b.graph_mode)}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides compared. Where no group is on both, `totals` compares their sums, if they have such."""

    a: Side
    b: Side
    groups: tuple[GroupChange, ...]
    totals: tuple[Change, ...] = ()
    only_a: tuple[GroupKey, ...] = ()
    only_b: tuple[GroupKey, ...] = ()

    @property
    def comparable(self) -> bool:
        """Whether there is anything on both sides."""
        return bool(self.groups or self.totals)

    def slower(self, percent: float) -> list[GroupChange]:
        """The groups whose step takes more than `percent` % longer in B."""
        return [group for group in self.groups if group.step.percent is not None and group.step.percent > percent]

    def disagreeing(self, percent: float) -> list[tuple[str, Change]]:
        """What differs by more than `percent` % of the larger side: steps, and the categories that both sides measure.

        Between a live source and a trace only categories that have hooks are judged, and not what is left over.
        Categories below ``MATTERS`` of the step are not judged. Without groups the sums by category are.
        """
        mixed = self.a.is_live != self.b.is_live
        judged: list[tuple[str, Change, float]] = []
        for group in self.groups:
            judged.append((group.title, group.step, 0.0))
            least = MATTERS * max(group.step.a_ns, group.step.b_ns)
            for row in group.rows:
                if row.name == REST or (mixed and row.name not in HOOKED_CATEGORIES):
                    continue
                judged.append((group.title, row, least))
        if not self.groups:
            least = MATTERS * max(sum(row.a_ns for row in self.totals), sum(row.b_ns for row in self.totals))
            judged += [("sums", row, least) for row in self.totals]
        return [
            (title, row)
            for title, row, least in judged
            if max(row.a_ns, row.b_ns) >= least and row.apart_percent > percent
        ]

    def to_json_dict(self) -> dict[str, Any]:
        """The document of ``vllm_k25.comparison/1``."""
        return {
            "schema": "vllm_k25.comparison/1",
            "a": {"name": self.a.name, "source": str(self.a.source), "complete": self.a.complete},
            "b": {"name": self.b.name, "source": str(self.b.source), "complete": self.b.complete},
            "groups": [
                {
                    "phase": str(group.key.phase),
                    "batch": group.key.batch,
                    "graph_mode": str(group.key.graph_mode),
                    "graph_mode_b": str(group.key_b.graph_mode),
                    "steps": {"a": group.a_steps, "b": group.b_steps},
                    "step": group.step.to_json_dict(),
                    "categories": {row.name: row.to_json_dict() for row in group.rows},
                }
                for group in self.groups
            ],
            "totals": {row.name: row.to_json_dict() for row in self.totals},
            "only_a": [" ".join(map(str, key)) for key in self.only_a],
            "only_b": [" ".join(map(str, key)) for key in self.only_b],
        }


def compare_sides(a: Side, b: Side) -> Comparison:
    """Compare the groups that are on both sides; where there are none, the sums of the whole captures."""
    pairs = list(_pairs(a, b))
    groups = tuple(_group_change(key_a, key_b, a.groups[key_a], b.groups[key_b]) for key_a, key_b in pairs)
    totals: tuple[Change, ...] = ()
    if not groups and a.totals and b.totals:
        totals = _changes(dict(a.totals), dict(b.totals))
    in_a, in_b = {key for key, _ in pairs}, {key for _, key in pairs}
    return Comparison(
        a,
        b,
        groups,
        totals,
        tuple(key for key in sorted(a.groups, key=group_order) if key not in in_a),
        tuple(key for key in sorted(b.groups, key=group_order) if key not in in_b),
    )


def _pairs(a: Side, b: Side) -> Iterator[tuple[GroupKey, GroupKey]]:
    """Equal keys; then, of one phase and batch, a single group on each side, since a trace infers the graph mode."""
    left = [key for key in b.groups if key not in a.groups]
    for key in sorted(a.groups, key=group_order):
        if key in b.groups:
            yield key, key
            continue
        mine = [k for k in a.groups if k[:2] == key[:2] and k not in b.groups]
        theirs = [k for k in left if k[:2] == key[:2]]
        if len(mine) == len(theirs) == 1:
            yield key, theirs[0]


def _group_change(key_a: GroupKey, key_b: GroupKey, a: Steps, b: Steps) -> GroupChange:
    rows = _changes({**a.by_category, REST: a.rest_ns}, {**b.by_category, REST: b.rest_ns})
    return GroupChange(key_a, key_b, a.steps, b.steps, Change("step", a.step_ns, b.step_ns, None), rows)


def _changes(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[Change, ...]:
    whole = sum(b.values()) - sum(a.values())
    changed = abs(whole) > NO_CHANGE * max(abs(sum(a.values())), abs(sum(b.values())))
    names = sorted(a.keys() | b.keys(), key=lambda name: (name == REST, category_order(name)))
    made = []
    for name in names:
        before, after = a.get(name, 0.0), b.get(name, 0.0)
        made.append(Change(name, before, after, (after - before) / whole if changed else None))
    return tuple(made)
