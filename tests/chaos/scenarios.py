"""The scenarios by name, each with what the README's table says of it."""

from __future__ import annotations

from typing import Final

SCENARIOS: Final[dict[str, str]] = {
    "exporter": "exporter killed, ended and hung up on (KILL, TERM, INT, HUP), started again each time",
    "tmpfs_full": "the rings' tmpfs filled to the last byte",
    "truncated": "rings cut short, again and again, under the worker and under both readers",
    "corrupted": "rings overwritten with random bytes, again and again",
    "profilers": "torch.profiler through `/start_profile`, with an NVTX tool attached",
    "deleted": "rings deleted",
    "hooks": "hooks that raise, recurse without end, and sleep; workers forked",
    "reload": "plugin loaded by four threads at once, again and again, and its module reloaded",
    "clock": "wall clock set back and forth by hours",
    "disk_full": "the disk with the rings filled to the last byte",
    "read_only": "rings made immutable: every write is refused",
    "worker_killed": "a worker killed",
    "api_server_killed": "API server killed",
    "sigterm": "SIGTERM to the server",
    "sigint": "SIGINT to the server",
    "sighup": "SIGHUP to the server",
    "soak": "10,000 steps",
}
