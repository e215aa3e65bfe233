"""The rings of one server taken together: whose they are, and what has to be said about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from vllm_k25_instrument.hooks.names import HOOK_INDEX
from vllm_k25_instrument.model import LOST_REASONS, PHASES, LostReason, Phase, RankIdentity
from vllm_k25_instrument.report.caveats import Caveat, CaveatCode, by_rank, format_ranks
from vllm_k25_instrument.report.subject import PhaseCount, Subject
from vllm_k25_instrument.ring import RingError, RingReader
from vllm_k25_instrument.totals import Totals

ATTACHED: Final = "attached"
MISSING: Final = "missing"
"""The state of a hook that is in place, as it stands in a ring's identity."""

LOST_REMEDY: Final = {
    LostReason.ABORTED: "the step itself raised or was never finished",
    LostReason.TOO_LARGE: "raise K25_RING_BYTES",
    LostReason.ERROR: "see the worker's log",
    LostReason.UNREAD: "raise K25_SAMPLE_EVERY",
    LostReason.UNTIMED: "they replayed a graph without timing events; twins are made of the decode sizes, "
    "see K25_GRAPHS and K25_GRAPH_SIZES",
    LostReason.OVERWRITTEN: "their graph was replayed again before it was read; K25_GRAPHS=twin prevents that",
}
"""What a user can do, or has to know, for every reason."""


@dataclass(frozen=True, slots=True)
class RankRing:
    """One readable ring, with its identity and counters as they stood when it was looked at."""

    reader: RingReader
    identity: RankIdentity
    totals: Totals
    written: int

    @classmethod
    def of(cls, reader: RingReader) -> RankRing:
        """The ring as it stands now. Raises RingError where it has become unreadable since it was opened."""
        return cls(reader, reader.identity, reader.totals(), reader.written)

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.identity.coordinates.global_rank

    @property
    def steps(self) -> int:
        """Executed steps of all phases since start."""
        return sum(self.totals.steps(code) for code in range(len(PHASES)))

    def sampled(self, *phases: Phase) -> int:
        """Sampled steps since start, of all phases where none is named."""
        return sum(self.totals.sampled(PHASES.index(phase)) for phase in phases or PHASES)

    def lost(self) -> dict[LostReason, int]:
        """Samples lost since start, by reason; reasons that never happened are absent."""
        counts = {reason: self.totals.lost(code) for code, reason in enumerate(LOST_REASONS)}
        return {reason: count for reason, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class RingSet:
    """The rings of one instance, one per rank, by rank; and what could not be read or did not belong."""

    rings: tuple[RankRing, ...]
    errors: tuple[RingError, ...] = ()
    set_aside: tuple[Caveat, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks found."""
        return tuple(ring.rank for ring in self.rings)

    @property
    def ranks_expected(self) -> int:
        """World size of the server; the largest that a ring states."""
        return max((ring.identity.coordinates.world_size for ring in self.rings), default=0)

    @property
    def alive(self) -> bool:
        """Whether any rank's worker lives."""
        return any(ring.reader.alive for ring in self.rings)

    @property
    def comparable(self) -> bool:
        """Whether all ranks do the same work, so that one of them can be called the slowest."""
        return all(c.pp_size == 1 and c.dp_size == 1 for c in (ring.identity.coordinates for ring in self.rings))

    @property
    def subject(self) -> Subject:
        """The server that the rings tell of."""
        if not self.rings:
            return Subject()
        first = self.rings[0].identity
        counts = (
            PhaseCount(
                phase,
                max(ring.totals.steps(code) for ring in self.rings),
                max(ring.totals.sampled(code) for ring in self.rings),
            )
            for code, phase in enumerate(PHASES)
        )
        return Subject(
            instance=first.instance,
            model=first.model,
            vllm_version=first.vllm_version,
            plugin_version=first.plugin_version,
            ranks_found=self.ranks,
            ranks_expected=self.ranks_expected,
            sample_every=first.sample_every,
            started_unix_ns=first.started_unix_ns,
            alive=self.alive,
            phases=tuple(count for count in counts if count.steps or count.sampled),
        )

    def looked_at_again(self, more_errors: Iterable[RingError] = ()) -> RingSet:
        """The same rings with their counters as they stand now."""
        errors = {error.path: error for error in (*self.errors, *more_errors)}
        rings = []
        for ring in self.rings:
            try:
                rings.append(RankRing.of(ring.reader))
            except RingError as error:  # what has been read of it is good: it stays, as it stood before
                errors[error.path] = error
                rings.append(ring)
        return replace(self, rings=tuple(rings), errors=tuple(errors.values()))

    def caveats(self) -> list[Caveat]:
        """What has to be said about these rings. Call it after the samples have been read.

        Ranks that are missing, and samples that say of themselves that they are incomplete, are seen by whoever adds
        up the samples (:class:`vllm_k25_instrument.report.breakdown.StepTally`).
        """
        return [
            *_unreadable(self.errors),
            *self.set_aside,
            *_about_steps(self),
            *_about_samples(self.rings),
            *_about_hooks(self.rings),
        ]


def look_at(readers: Iterable[RingReader], errors: Iterable[RingError] = ()) -> RingSet:
    """The ring set of `readers`. A second ring of a rank and rings of a second instance are set aside, with a caveat.

    Of several instances the one that started last is taken.
    """
    found: list[RankRing] = []
    unreadable = {error.path: error for error in errors}
    for reader in readers:
        try:
            found.append(RankRing.of(reader))
        except RingError as error:
            unreadable[error.path] = error
    set_aside: list[Caveat] = []
    found.sort(key=lambda ring: (ring.identity.started_unix_ns, ring.identity.instance), reverse=True)
    others = [ring for ring in found if ring.identity.instance != found[0].identity.instance]
    if others:
        set_aside.append(
            Caveat(
                CaveatCode.INSTANCES_MIXED,
                f"rings of several servers in one folder: only those of {found[0].identity.instance} are used, not "
                f"{_names(ring.reader.path for ring in others)}",
            )
        )
    by_global_rank: dict[int, RankRing] = {}
    twice: list[Path] = []
    for ring in found:
        if ring in others:
            continue
        if ring.rank in by_global_rank:
            twice.append(ring.reader.path)
        else:
            by_global_rank[ring.rank] = ring
    if twice:
        set_aside.append(
            Caveat(CaveatCode.RANK_TWICE, f"a second ring of a rank that is already there is left out: {_names(twice)}")
        )
    return RingSet(
        tuple(by_global_rank[rank] for rank in sorted(by_global_rank)), tuple(unreadable.values()), tuple(set_aside)
    )


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(str(path) for path in paths)


def _unreadable(errors: Sequence[RingError]) -> Iterator[Caveat]:
    for error in errors:
        yield Caveat(CaveatCode.RING_UNREADABLE, f"{error.path}: {error.reason}")


def _about_steps(rings: RingSet) -> Iterator[Caveat]:
    idle = [ring for ring in rings.rings if not ring.steps]
    if idle:
        states = by_rank({ring.rank: f"step hook {ring.identity.hooks.get('step', 'unknown')}" for ring in idle})
        who = "THE SERVER IS ALIVE BUT " if any(ring.reader.alive for ring in idle) else ""
        yield Caveat(
            CaveatCode.NO_STEPS,
            f"{who}NO STEP HAS BEEN RECORDED on {format_ranks(ring.rank for ring in idle)} ({states}): if the server "
            "has answered requests, its steps are not seen; run `vllm-k25 doctor`",
        )
    if any(ring.steps for ring in rings.rings) and not any(ring.written for ring in rings.rings):
        yield Caveat(
            CaveatCode.NO_SAMPLES,
            f"{rings.subject.steps:,} steps were executed and none was sampled ({rings.subject.sampling}): let the "
            "server run on, or set K25_SAMPLE_EVERY=1",
        )


def _about_samples(rings: Sequence[RankRing]) -> Iterator[Caveat]:
    corrupted = {r.rank: f"{r.reader.corrupted:,} in {r.reader.path}" for r in rings if r.reader.corrupted}
    if corrupted:
        yield Caveat(
            CaveatCode.SAMPLES_CORRUPTED,
            f"samples that do not match their checksum or were left unfinished are left out ({by_rank(corrupted)})",
        )
    overwritten = {r.rank: f"{r.reader.overwritten:,}" for r in rings if r.reader.overwritten}
    if overwritten:
        yield Caveat(
            CaveatCode.SAMPLES_OVERWRITTEN,
            f"older samples are no longer in the ring ({by_rank(overwritten)}): only the last ones are broken down; a "
            "larger K25_RING_SAMPLES and K25_RING_BYTES keep more",
        )
    lost = {ring.rank: ring.lost() for ring in rings if ring.lost()}
    if lost:
        texts = {
            rank: ", ".join(f"{count:,} {reason} ({LOST_REMEDY[reason]})" for reason, count in counts.items())
            for rank, counts in lost.items()
        }
        yield Caveat(CaveatCode.SAMPLES_LOST, f"steps that were due for sampling left no sample: {by_rank(texts)}")


def _about_hooks(rings: Sequence[RankRing]) -> Iterator[Caveat]:
    errors = _per_rank(
        (ring.rank, f"{name} ({ring.totals.hook_errors(index):,})")
        for ring in rings
        for name, index in HOOK_INDEX.items()
        if ring.totals.hook_errors(index)
    )
    if errors:
        yield Caveat(
            CaveatCode.HOOK_ERRORS,
            f"errors in our own hooks, which then go quiet ({by_rank(errors)}): what they timed counts as unattributed "
            "from there on; see the worker's log",
        )
    missing = _per_rank(
        (ring.rank, name) for ring in rings for name, state in ring.identity.hooks.items() if state == MISSING
    )
    if missing:
        yield Caveat(
            CaveatCode.HOOK_MISSING,
            f"hooks without a target in this vLLM ({by_rank(missing)}): their time counts as unattributed or as the "
            "range around them; run `vllm-k25 doctor`",
        )
    silent = _per_rank((ring.rank, name) for ring in rings for name in silent_hooks(ring))
    if silent:
        yield Caveat(
            CaveatCode.HOOK_NEVER_FIRED,
            f"hooks that are attached never fired in sampled steps ({by_rank(silent)}): their time, if any, counts as "
            "unattributed or as the range around them; run `vllm-k25 doctor`",
        )


def _per_rank(pairs: Iterable[tuple[int, str]]) -> Mapping[int, str]:
    texts: dict[int, list[str]] = {}
    for rank, text in pairs:
        texts.setdefault(rank, []).append(text)
    return {rank: ", ".join(those) for rank, those in texts.items()}


def silent_hooks(ring: RankRing) -> list[str]:
    """Hooks in state ``attached`` that should have made a range in the steps sampled so far, and made none."""
    return [
        name
        for name in _hooks_due(ring)
        if ring.identity.hooks.get(name) == ATTACHED and not ring.totals.hook_calls(HOOK_INDEX[name])
    ]


_KIMI_K25: Final = {"mla_attention": 61, "moe": 60, "moe_shared_experts": 60}


def _hooks_due(ring: RankRing) -> Iterator[str]:
    """Hooks of which a server of this shape fires at least one range in every step of the phases seen so far.

    The step hooks are not here: they make no range. That they fire is seen in the number of steps. A ring that does not
    say which layers its model has is taken for one of Kimi-K2.5's.
    """
    if not ring.sampled():
        return
    where, layers = ring.identity.coordinates, ring.identity.layers or _KIMI_K25
    yield "input_preparation"
    if where.tp_size > 1:
        yield "all_reduce"
    if where.pp == where.pp_size - 1:
        yield "sampling"
    if "moe" in layers:
        yield from ("moe_experts", "moe_routing")
    if "moe_shared_experts" in layers:
        yield "moe_shared_experts"
    if "attention" in layers:
        yield "attention"
    if "mla_attention" in layers:
        # Some backends verify drafted tokens as they prefill.
        if ring.sampled(Phase.DECODE) and not ring.totals.hook_calls(HOOK_INDEX["speculation"]):
            yield "mla_decode"
        if ring.sampled(Phase.PREFILL):
            yield "mla_prefill"
