"""The samples of a window as a file: bytes as they were in the ring, with what is needed to read them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from vllm_k25_instrument.campaign.errors import CampaignError
from vllm_k25_instrument.campaign.files import write_bytes
from vllm_k25_instrument.model import RankIdentity, StepSample, unpack_sample

SCHEMA: Final = "vllm_k25.samples/1"
SUFFIX: Final = ".samples"
MAX_BYTES: Final = 1 << 30
"""Of one rank's samples, inflated: a ring holds a sixteenth of it unless told otherwise."""


@dataclass(frozen=True, slots=True)
class RankSamples:
    """Sampled steps of one rank: `packed` by :func:`vllm_k25_instrument.model.pack_sample`, `details` their table."""

    identity: RankIdentity
    details: tuple[str, ...]
    packed: tuple[bytes, ...]
    schema: str = SCHEMA

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.identity.coordinates.global_rank

    def samples(self) -> Iterator[StepSample]:
        """The samples. Raises ValueError where one is damaged."""
        for data in self.packed:
            yield unpack_sample(data, self.details)


def write_samples(folder: Path, identity: RankIdentity, details: Sequence[str], packed: Iterable[bytes]) -> Path:
    """Write the samples of one rank into `folder`. Raises OSError."""
    path = folder / f"rank-{identity.coordinates.global_rank:05d}{SUFFIX}"
    document = msgspec.msgpack.encode(RankSamples(identity, tuple(details), tuple(packed)))
    write_bytes(path, zlib.compress(document, 6))
    return path


def read_samples(folder: Path) -> list[RankSamples]:
    """The samples of all ranks in `folder`, by rank. Raises CampaignError where a file is none."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            ranks = msgspec.msgpack.decode(_inflated(path.read_bytes()), type=RankSamples)
        except OSError as error:
            raise CampaignError(f"{path}: cannot be read: {error.strerror}") from error
        except (zlib.error, msgspec.MsgspecError) as error:
            raise CampaignError(f"{path}: not the samples of a rank ({error})") from error
        if ranks.schema != SCHEMA:
            raise CampaignError(f"{path}: schema {ranks.schema!r:.40} instead of {SCHEMA}")
        found.append(ranks)
    return sorted(found, key=lambda rank: rank.rank)


def _inflated(data: bytes) -> bytes:
    """Raises zlib.error where it is damaged, or more than ``MAX_BYTES``."""
    inflater = zlib.decompressobj()
    found = inflater.decompress(data, MAX_BYTES)
    if not inflater.eof:
        raise zlib.error(f"it is cut off, or inflates to more than {MAX_BYTES >> 20} MiB")
    return found
