"""A vLLM whose source is patched, with the plugin kept out, and the hooked one: same prompts, same counts."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import PROMPTS, Answer, Launch, Running
from tests.exposition import our_samples
from vllm_k25_instrument.hooks.resolve import installed_vllm
from vllm_k25_instrument.model import Phase, StepSample
from vllm_k25_instrument.patching.replace import bring_to
from vllm_k25_instrument.patching.series import FileState, TreeState, load_series, release_of, tree_state

pytestmark = pytest.mark.e2e

OTHER_PLUGINS = "k25_demo_cpu_setup"
"""What lets vLLM's CPU build serve the model; our own entry point is not among the plugins that vLLM may load."""

MAX_TOKENS = 24
STEPS = len(PROMPTS) * MAX_TOKENS


@dataclass(frozen=True)
class Seen:
    """What the instrument saw of the prompts, served one after the other."""

    answers: list[Answer]
    steps: dict[int, list[object]]
    counts: dict[object, float]


def kinds(sample: StepSample) -> object:
    """All of a step but its times."""
    ranges = Counter((r.category, r.detail, r.layer, r.stream, r.bytes, r.parent) for r in sample.ranges)
    kind = (sample.phase, sample.requests, sample.tokens, sample.padded_tokens, sample.graph_mode, sample.complete)
    return (*kind, sorted(ranges.items(), key=str))


def is_count(name: str) -> bool:
    """Whether a series counts calls, steps or bytes. Which rank was the slowest is a matter of time."""
    return name.endswith(("_count", "_total")) and not name.endswith("_seconds_total") and "slowest" not in name


def serve(running: Running) -> Seen:
    """Serves the prompts, and waits until every rank has written their steps down."""
    known = {rank: len(samples) for rank, samples in running.samples().items()}
    before = our_samples(running.client.get("/metrics"))
    answers = [running.client.complete(prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
    deadline = time.monotonic() + 30
    while True:
        new = {rank: samples[known[rank] :] for rank, samples in running.samples().items()}
        if min(map(len, new.values())) >= STEPS or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    after = our_samples(running.client.get("/metrics"))
    counts = {series: value - before.get(series, 0.0) for series, value in after.items() if is_count(str(series[0]))}
    return Seen(
        answers,
        {rank: [kinds(sample) for sample in samples] for rank, samples in new.items()},
        {series: value for series, value in counts.items() if value},
    )


@pytest.fixture(scope="module")
def patched_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a patched copy of the installed vLLM. Hard links will do: patching replaces files."""
    installed = installed_vllm()
    if installed is None:
        pytest.skip("vLLM is not installed here")
    folder = tmp_path_factory.mktemp("patched")
    link_tree(installed, folder / "vllm")
    series = load_series(release_of(installed))
    bring_to(folder / "vllm", series.examine(folder / "vllm"), FileState.PATCHED)
    assert tree_state(series.examine(folder / "vllm")) is TreeState.APPLIED
    assert tree_state(series.examine(installed)) is TreeState.NOT_APPLIED
    return folder


def link_tree(source: Path, target: Path) -> None:
    for folder, subfolders, files in os.walk(source):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        here = target / Path(folder).relative_to(source)
        here.mkdir()
        for name in files:
            try:
                os.link(Path(folder, name), here / name)
            except OSError:  # another file system
                (here / name).symlink_to(Path(folder, name))


@pytest.fixture(scope="module")
def patched(launch: Launch, patched_vllm: Path) -> Iterator[Running]:
    with launch(
        "patched",
        plugin_path=patched_vllm,
        VLLM_PLUGINS=OTHER_PLUGINS,
        K25_INSTRUMENT="1",
        K25_SAMPLE_EVERY="1",
    ) as running:
        yield running


def test_patched_and_hooked_servers_agree_on_every_count_and_category(patched: Running, every_step: Running) -> None:
    hooked, seen = serve(every_step), serve(patched)
    assert seen.answers == hooked.answers
    for rank in (0, 1):
        assert len(seen.steps[rank]) == STEPS
        assert seen.steps[rank] == hooked.steps[rank]
    assert seen.counts == hooked.counts
    assert len(seen.counts) > 50
    phases = Counter(step[0] for step in seen.steps[0])  # type: ignore[index]
    assert phases == {Phase.PREFILL: len(PROMPTS), Phase.DECODE: STEPS - len(PROMPTS)}


def test_their_hooks_are_in_the_same_states(patched: Running, every_step: Running) -> None:
    states = [ring.identity.hooks for running in (patched, every_step) for ring in running.rings]
    assert states[0]["step"] == "attached"
    assert states == [states[0]] * 4


def test_the_patched_server_ran_the_patched_source_and_not_our_plugin(patched: Running, patched_vllm: Path) -> None:
    assert len(patched.our_log()) == 2, patched.our_log()
    for pid in patched.server.worker_pids:
        assert str(patched_vllm / "vllm") in Path(f"/proc/{pid}/maps").read_text()
