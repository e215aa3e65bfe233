"""The limits of a breakdown of rings: what `report --gpu` adds."""

from __future__ import annotations

from pathlib import Path

from vllm_k25_instrument.limits.batches import read_measured
from vllm_k25_instrument.limits.gpus import AUTO
from vllm_k25_instrument.limits.machine import make_machine
from vllm_k25_instrument.limits.report import Limits, find_limits
from vllm_k25_instrument.report.rings import Report
from vllm_k25_instrument.ring import open_rings


def limits_of_rings(
    made: Report,
    where: Path,
    *,
    gpu: str | None,
    config: Path | None = None,
    context: float | None = None,
    link: str = AUTO,
    kv_bits: int | None = None,
    hop_us: float | None = None,
) -> Limits | None:
    """The limits of `made`, the breakdown of the rings at `where`; None where no GPU is named.

    Reads the samples once more, for their batches. Raises LimitsError where an option is missing or unknown.
    """
    if gpu is None:
        return None
    readers, _ = open_rings(where)
    try:
        measured = read_measured(readers)
    finally:
        for reader in readers:
            reader.close()
    machine = make_machine(
        gpu=gpu,
        config=config,
        model=made.subject.model,
        context=context,
        sharding=measured.known_sharding(),
        link=link,
        kv_bits=kv_bits,
        hop_us=hop_us,
    )
    return find_limits(made.breakdown, measured, machine)
