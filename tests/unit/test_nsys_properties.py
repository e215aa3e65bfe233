"""Generated exports, in every schema, come back to the nanosecond."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nsys_exports import KERNEL, MEMCPY, SCHEMAS, Export, Schema, Truth, random_export
from vllm_k25_instrument.analysis.capture import NO_ANNOTATION, Capture
from vllm_k25_instrument.analysis.nsys import read_nsys
from vllm_k25_instrument.report.caveats import CaveatCode


def read_back(capture: Capture) -> list[Truth]:
    """A capture in the words of the generator."""
    work, launches, ranges = capture.activities, capture.launches, capture.annotations
    found = []
    for row in range(len(work)):
        names, at = [], int(work.annotation[row])
        while at != NO_ANNOTATION:
            names.append(capture.names[ranges.name[at]])
            at = int(ranges.parent[at])
        launch = int(work.launch[row])
        found.append(
            Truth(
                capture.process,
                capture.device,
                int(work.kind[row]),
                capture.names[work.name[row]],
                int(work.start_ns[row]),
                int(work.duration_ns[row]),
                int(work.stream[row]),
                int(work.bytes[row]),
                int(launches.start_ns[launch]) if launch >= 0 else None,
                tuple(names),
            )
        )
    return found


def in_schema(truth: Truth, schema: Schema) -> Truth:
    """What of the truth this schema can hold."""
    if truth.kind == MEMCPY and "copyKind" in schema.columns_left_out:
        return Truth(**{**vars(truth), "name": "Memcpy"})
    return truth


def by_start(truth: Truth) -> tuple[int, int, int, str]:
    return truth.process, truth.start_ns, truth.duration_ns, truth.name


def written(export: Export, schema: Schema, seed: int, folder: str) -> Path:
    return export.write(Path(folder) / "export.sqlite", schema, random.Random(seed))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    schema=st.sampled_from(sorted(SCHEMAS)),
    processes=st.integers(1, 3),
    operations=st.integers(0, 80),
)
def test_a_generated_export_comes_back_to_the_nanosecond_with_its_ranges(
    seed: int, schema: str, processes: int, operations: int
) -> None:
    # Without threads the nodes of several processes cannot be told apart, and the reader abstains.
    export = random_export(seed, processes if SCHEMAS[schema].thread_of_nodes else 1, operations)
    with TemporaryDirectory() as folder:
        captures = read_nsys(written(export, SCHEMAS[schema], seed, folder))
    found = sorted((truth for capture in captures for truth in read_back(capture)), key=by_start)
    assert found == sorted((in_schema(truth, SCHEMAS[schema]) for truth in export.truth), key=by_start)
    for capture in captures:
        assert capture.complete
        assert capture.clock_base_ns == export.unix_start_ns
        assert (capture.activities.start_ns[1:] >= capture.activities.start_ns[:-1]).all()
        assert (capture.launches.start_ns[1:] >= capture.launches.start_ns[:-1]).all()
        assert (capture.annotations.start_ns[1:] >= capture.annotations.start_ns[:-1]).all()


@pytest.mark.parametrize("schema", sorted(SCHEMAS))
def test_each_graph_launch_is_one_launch_of_all_its_kernels(schema: str, tmp_path: Path) -> None:
    export = random_export(7, 1, 200)
    (capture,) = read_nsys(export.write(tmp_path / "export.sqlite", SCHEMAS[schema]))
    graph_launches = {truth.launch_ns for truth in export.truth if truth.name == "bare_kernel"}
    assert int(capture.launches.is_graph.sum()) == len(graph_launches) > 3
    kernels = [truth for truth in export.truth if truth.kind == KERNEL and truth.launch_ns in graph_launches]
    assert len(kernels) == 6 * len(graph_launches)
    assert not any(note.code is CaveatCode.GRAPH_NODES_UNMAPPED for note in capture.notes)
