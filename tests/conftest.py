"""Put in the background by a script, a process has SIGINT ignored, and so has all that it starts.

Tests that interrupt something expect neither.
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
