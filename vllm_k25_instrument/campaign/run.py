"""The campaign: a list of steps, each done once, whole or not at all, and gone on with after a kill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from vllm_k25_instrument.campaign import profile
from vllm_k25_instrument.campaign.environment import describe_environment
from vllm_k25_instrument.campaign.errors import CampaignError, NotPossibleError, ServerGoneError
from vllm_k25_instrument.campaign.files import folder_files, fresh_folder, write_json
from vllm_k25_instrument.campaign.live import (
    LiveSource,
    NoSource,
    RingSource,
    choose_source,
    decode_steps,
    is_this_host,
    tensor_parallel,
    worker_pid,
)
from vllm_k25_instrument.campaign.load import OPENAI, VLLM_BENCH, Client, LoadSpec, OpenAiClient, VllmBench, WindowLoad
from vllm_k25_instrument.campaign.load import vllm_installed as is_vllm_installed
from vllm_k25_instrument.campaign.manifest import (
    FULL,
    Manifest,
    Phase,
    State,
    StepRecord,
    give_up_reserve,
    now,
    reserve,
)
from vllm_k25_instrument.campaign.micro import BENCHES, run_bench
from vllm_k25_instrument.campaign.nsys import analyse_export, recipe
from vllm_k25_instrument.campaign.scrub import scrub_text
from vllm_k25_instrument.campaign.server import ModelFacts, Server
from vllm_k25_instrument.campaign.warm_up import ROUND_TOKENS, STEADY_ROUNDS, warm_up

WARM_UP_FILE: Final = "warm-up.json"
PROFILE_TOKENS: Final = 24
"""Output tokens of the requests under the profiler: traces of long windows take minutes to write and to read."""


class Watcher(Protocol):
    """Whoever watches a campaign."""

    def progress(self, text: str) -> None:
        """What is going on; replaces what was said before."""

    def say(self, text: str) -> None:
        """A line that stays."""


class DiskFullError(CampaignError):
    """There is no room for a step's output: nothing further can be kept."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where things are on this machine, of no interest to others: not part of the plan."""

    folder: Path
    ring_dir: Path
    trace_dir: Path | None = None
    nsys_export: Path | None = None


def window_folder(folder: Path, concurrency: int, number: int) -> Path:
    """The raw output of a window."""
    return folder / "windows" / f"c{concurrency:05d}" / f"w{number}"


def profile_folder(folder: Path, concurrency: int) -> Path:
    """Traces of one concurrency and their analysis."""
    return folder / "profile" / f"c{concurrency:05d}"


def micro_folder(folder: Path, bench: str) -> Path:
    """The result of a micro-benchmark."""
    return folder / "micro" / bench


def nsys_folder(folder: Path) -> Path:
    """The analysis of an nsys export."""
    return folder / "nsys"


@dataclass(slots=True)
class Campaign:
    """One campaign, on its way. `run` does what is left of it."""

    where: Where
    manifest: Manifest
    server: Server
    watcher: Watcher
    facts: ModelFacts
    absent: bool = False
    """Whether the server is not there, and need not be."""
    _gone: str = ""
    _source: LiveSource | None = None
    _client: Client | None = None
    _warm: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Every step that is not done. Raises DiskFullError where nothing more can be kept, OSError where `where` goes
        away; all else is recorded with its step.
        """
        try:
            self.manifest.stopped = ""
            reserve(self.where.folder)
            self.manifest.environment = describe_environment()
            self.manifest.server |= {"vllm": self.facts.version, "max_model_len": self.facts.max_length}
            self._list_steps()
            self._save()
            if not self.absent:
                self._macro()
            if self.manifest.plan.micro:
                self._micro()
            self._nsys()
        except OSError as error:
            if error.errno in FULL:
                self._record_full(str(error.strerror))
                raise DiskFullError(self._full()) from error
            raise
        finally:
            give_up_reserve(self.where.folder)

    def _record_full(self, why: str) -> None:
        """The step that there was no room for, in the manifest, as far as there is room for that."""
        give_up_reserve(self.where.folder)
        self.manifest.stopped = f"no space left in the campaign's folder ({why})"
        for record in self.manifest.steps:
            if record.state is State.RUNNING:
                record.state, record.error = State.FAILED, f"no space left for it ({why})"
        with suppress(OSError):
            self._save()

    def _list_steps(self) -> None:
        """All of them in the manifest before the first begins, so that it says what is missing whatever happens."""
        plan = self.manifest.plan
        for concurrency in plan.concurrency:
            self.manifest.step(_warm_up_name(concurrency), Phase.MACRO)
        for number in range(1, plan.windows + 1):
            for concurrency in plan.concurrency:
                self.manifest.step(_window_name(concurrency, number), Phase.MACRO)
        for concurrency in plan.concurrency:
            self.manifest.step(_profile_name(concurrency), Phase.MACRO)
        for bench in BENCHES if plan.micro else ():
            self.manifest.step(f"bench {bench}", Phase.MICRO)
        self.manifest.step("nsys", Phase.NSYS)

    def _save(self) -> None:
        self.manifest.save(self.where.folder)

    def _full(self) -> str:
        return f"no space left in {self.where.folder}: free some, then go on with --resume; what was measured is kept"

    # --- a step ----------------------------------------------------------------------------------------------

    def _step(self, name: str, phase: Phase, target: Path, work: Callable[[Path], str], *, again: bool = False) -> bool:
        """Do a step into a folder beside `target` and put it in place when it is whole; whether it is done.

        A step that is done is left as it is, unless it is to be done `again`.
        """
        record = self.manifest.step(name, phase)
        if record.state is State.DONE and target.is_dir() and not again:
            return True
        record.state, record.started, record.error, record.note, record.files = State.RUNNING, now(), "", "", []
        self._save()
        self.watcher.progress(name)
        began = time.monotonic()
        partial = target.with_name(f"{target.name}.partial")
        failed = target.with_name(f"{target.name}.failed")
        try:
            with self._recorded(record):
                record.note = scrub_text(work(fresh_folder(partial)), (self.server.host,))
                fresh_folder(failed).rmdir()
                fresh_folder(target).rmdir()
                partial.rename(target)
                record.state = State.DONE
        finally:
            # What is interrupted stays `running`, and is done again.
            if record.state in (State.FAILED, State.NOT_POSSIBLE) and partial.is_dir():
                fresh_folder(failed).rmdir()
                partial.rename(failed)
                with suppress(OSError):  # what failed before it had anything leaves no folder
                    failed.rmdir()
            kept = target if record.state is State.DONE else failed
            record.files = folder_files(self.where.folder, kept) if kept.is_dir() else []
            record.seconds = round(time.monotonic() - began, 2)
            self._save()
        if record.state is not State.DONE:
            self.watcher.say(f"{name}: {record.error}")
        return record.state is State.DONE

    @contextmanager
    def _recorded(self, record: StepRecord) -> Iterator[None]:
        """What goes wrong inside is the step's error. A full disk is also everybody's."""
        try:
            yield
        except NotPossibleError as error:
            record.state, record.error = State.NOT_POSSIBLE, self._line(error)
        except ServerGoneError as error:
            record.state, record.error = State.FAILED, self._line(error)
            self._gone = self._gone or record.error
        except CampaignError as error:
            record.state, record.error = State.FAILED, self._line(error)
        except OSError as error:
            record.state = State.FAILED
            if error.errno in FULL:
                record.error = f"no space left for it ({error.strerror})"
                give_up_reserve(self.where.folder)
                raise
            record.error = self._line(error)
        except Exception as error:  # a bug of ours costs a step, not the campaign
            record.state, record.error = State.FAILED, f"{type(error).__name__}: {self._line(error)}"

    def _line(self, error: BaseException) -> str:
        return scrub_text(" ".join(str(error).split()), (self.server.host,))

    def _alive(self) -> None:
        """Raises ServerGoneError where the server has gone, CampaignError where the model has or it was gone before."""
        if self._gone:
            raise CampaignError("not measured: the server was gone; start it and go on with --resume")
        self.server.model(self.manifest.plan.model)

    # --- phase 1 ---------------------------------------------------------------------------------------------

    def _macro(self) -> None:
        plan = self.manifest.plan
        # In rounds over the concurrencies: what drifts while the campaign runs then shows in the intervals.
        for number in range(1, plan.windows + 1):
            for concurrency in plan.concurrency:
                self._step(
                    _window_name(concurrency, number),
                    Phase.MACRO,
                    window_folder(self.where.folder, concurrency, number),
                    lambda folder, c=concurrency, n=number: self._window(folder, c, n),  # type: ignore[misc]
                )
        for concurrency in plan.concurrency:
            self._step(
                _profile_name(concurrency),
                Phase.MACRO,
                profile_folder(self.where.folder, concurrency),
                lambda folder, c=concurrency: self._profile(folder, c),  # type: ignore[misc]
            )

    def _spec(self, concurrency: int, number: int) -> LoadSpec:
        plan = self.manifest.plan
        return LoadSpec(
            concurrency=concurrency,
            requests=concurrency * plan.requests_per_client,
            input_tokens=plan.input_tokens,
            output_tokens=plan.output_tokens,
            seed=number,
        )

    def _warmed_up(self, concurrency: int) -> None:
        """Warm the server up for this concurrency, once in a run: warm is the server, not the campaign's folder.

        The first one finds out where the live breakdown comes from.
        """
        if concurrency in self._warm:
            return
        local = is_this_host(self.server.host)
        before = decode_steps(self.where.ring_dir) if local and self._source is None else {}
        target = self.where.folder / "warm-up" / f"c{concurrency:05d}"
        done = self._step(
            _warm_up_name(concurrency),
            Phase.MACRO,
            target,
            lambda folder: self._warm_up(folder, concurrency),
            again=True,
        )
        if not done:
            raise CampaignError("not measured: the warm-up failed")
        self._warm.add(concurrency)
        if self._source is None:
            least = STEADY_ROUNDS * (ROUND_TOKENS - 1) // 2
            self._source, why = choose_source(self.server, self.where.ring_dir, before, least, self.server.metrics())
            self.manifest.server["live_source"] = scrub_text(why, (self.server.host,))
            if isinstance(self._source, RingSource):
                self.manifest.server["tensor_parallel"] = tensor_parallel(self._source.instance)
            self.watcher.say(f"live breakdown: {why}")

    def _warm_up(self, folder: Path, concurrency: int) -> str:
        self._alive()
        plan = self.manifest.plan
        client = OpenAiClient(self.server.url, plan.model)
        say = self.watcher.progress
        found = warm_up(
            client.send, concurrency, plan.input_tokens, lambda text: say(f"{_warm_up_name(concurrency)}: {text}")
        )
        write_json(folder / WARM_UP_FILE, found)
        if not found["rounds"]:
            raise CampaignError(f"no request of the warm-up succeeded at concurrency {concurrency}")
        if found["stable"]:
            return f"stable after {found['rounds']} rounds"
        apart = found["spread"]
        text = "" if apart is None else f": the last {STEADY_ROUNDS} differ by {100 * apart:.0f} %"
        return f"step times do not stand still after {found['rounds']} rounds{text}"

    def _window(self, folder: Path, concurrency: int, number: int) -> str:
        self._alive()
        self._warmed_up(concurrency)
        source = self._source or NoSource(self.server)
        client = self._the_client()
        name = _window_name(concurrency, number)
        source.begin(folder)
        load = client.run(
            self._spec(concurrency, number), folder, lambda text: self.watcher.progress(f"{name}: {text}")
        )
        self.watcher.progress(f"{name}: reading the live breakdown")
        said = ""
        try:
            source.end(load, folder)
        except CampaignError as error:  # the client's figures are good
            said = f"no live breakdown: {error}"
        self._say_window(name, load)
        return said

    def _say_window(self, name: str, load: WindowLoad) -> None:
        tpot = "-" if load.tpot is None else f"{load.tpot.mean_ns / 1e6:.2f} ms"
        self.watcher.say(
            f"{name}: {tpot} per output token, {load.tokens_per_second:,.1f} tokens/s, {load.requests} requests, "
            f"{load.failed} failed"
        )

    def _the_client(self) -> Client:
        """The client that the plan names; on `auto` vLLM's own where it is installed and finds the tokenizer here."""
        if self._client is not None:
            return self._client
        plan, root = self.manifest.plan, self.facts.root
        tokenizer = plan.tokenizer or root
        can = is_vllm_installed() and (bool(plan.tokenizer) or has_tokenizer(root))
        wanted = plan.client if plan.client != "auto" else VLLM_BENCH if can else OPENAI
        if wanted == VLLM_BENCH:
            if not is_vllm_installed():
                raise CampaignError("--client vllm-bench: vLLM is not installed beside this Python")
            self._client = VllmBench(self.server.url, plan.model, tokenizer, trust_remote_code=plan.trust_remote_code)
        else:
            self._client = OpenAiClient(self.server.url, plan.model)
        self.manifest.server["client"] = self._client.name
        return self._client

    def _profile(self, folder: Path, concurrency: int) -> str:
        self._alive()
        plan = self.manifest.plan
        name = _profile_name(concurrency)

        def say(text: str) -> None:
            self.watcher.progress(f"{name}: {text}")

        self._warmed_up(concurrency)
        client = OpenAiClient(self.server.url, plan.model)
        where = self._trace_directory()
        profile.start(self.server)
        try:
            if where is None:
                raise CampaignError("where the server writes its traces is not known: name it with --trace-dir")
            directory = profile.TraceDirectory.look(where)
            say("load under the profiler")
            client.run(LoadSpec(concurrency, concurrency, plan.input_tokens, PROFILE_TOKENS), folder, say)
        finally:
            profile.stop(self.server, say)
        files = profile.wait_until_complete(directory, say)
        kept = profile.keep(files, folder / profile.TRACES)
        say("analysing the traces")
        return profile.analyse(kept, folder)

    def _trace_directory(self) -> Path | None:
        """Where the traces come to lie: as told, or as the server's own command line says."""
        if self.where.trace_dir is not None:
            return self.where.trace_dir
        if isinstance(self._source, RingSource):
            pid = worker_pid(self._source.instance)
            return None if pid is None else profile.configured_directory(pid)
        if is_this_host(self.server.host):
            for instance in decode_steps(self.where.ring_dir):
                pid = worker_pid(instance)
                found = None if pid is None else profile.configured_directory(pid)
                if found is not None:
                    return found
        return None

    # --- phases 2 and 3 --------------------------------------------------------------------------------------

    def _micro(self) -> None:
        for bench in BENCHES:
            self._step(
                f"bench {bench}",
                Phase.MICRO,
                micro_folder(self.where.folder, bench),
                lambda folder, b=bench: run_bench(  # type: ignore[misc]
                    b, self._bench_options(b), folder, self.watcher.progress
                ),
            )

    def _bench_options(self, bench: str) -> list[str]:
        """At the sizes of the served model, where its config.json is here, for the concurrencies of the campaign."""
        if bench == "overhead":
            return []
        plan = self.manifest.plan
        config = plan.config or (self.facts.root if (Path(self.facts.root) / "config.json").is_file() else "")
        options = ["--tokens", ",".join(map(str, plan.concurrency)), *(("--config", config) if config else ())]
        ranks = self.manifest.server.get("tensor_parallel")
        if ranks and bench == "moe":
            options += ["--tensor-parallel-size", str(ranks)]
        if ranks and ranks > 1 and bench == "all-reduce":
            options += ["--ranks", str(ranks)]
        if plan.gpu:
            options += ["--gpu", plan.gpu]
        return options

    def _nsys(self) -> None:
        export = self.where.nsys_export
        self._step(
            "nsys",
            Phase.NSYS,
            nsys_folder(self.where.folder),
            lambda folder: recipe(self.watcher.say) if export is None else analyse_export(export, folder),
            again=export is not None,
        )


def has_tokenizer(root: str) -> bool:
    """Whether the tokenizer of a model is on this machine, in a folder or in the cache of the Hugging Face hub."""
    if Path(root).is_dir():
        return True
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    try:
        return isinstance(try_to_load_from_cache(root, "tokenizer_config.json"), str)
    except ValueError:  # not a name of the hub
        return False


def _warm_up_name(concurrency: int) -> str:
    return f"warm-up at concurrency {concurrency}"


def _window_name(concurrency: int, number: int) -> str:
    return f"window {number} at concurrency {concurrency}"


def _profile_name(concurrency: int) -> str:
    return f"profile at concurrency {concurrency}"
