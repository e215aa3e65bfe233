"""How the stand-alone exporter is told to end. Imports nothing that starts a thread: signals are held back first."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_STOP_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM})


@contextmanager
def stop_signals() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM inside the context, for `wait_for_stop`; threads started in it inherit that.

    A thread that was there before (numpy's, for one) would take the second signal, and the process would die of it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        while signal.sigtimedwait(_STOP_SIGNALS, 0) is not None:
            pass  # told twice: it has ended already
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_stop() -> None:
    """Wait for SIGINT or SIGTERM. Only inside `stop_signals`, which turns them into something to wait for."""
    signal.sigwait(_STOP_SIGNALS)
