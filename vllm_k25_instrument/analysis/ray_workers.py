"""The same work on an existing Ray cluster, for files that outgrow one machine. Ray is imported nowhere else."""

from __future__ import annotations

import importlib
import re
import socket
from collections.abc import Sequence
from typing import Any, Final

from vllm_k25_instrument.analysis.workers import Advance, Done, Failure, Job, run_job

CONNECT_S: Final = 5.0

_HOST_PORT: Final = re.compile(r"(?:ray://)?(\S+):(\d+)")


class RayError(Exception):
    """The cluster cannot be used. One line: the address, what is wrong, what to do."""


class RayMapper:
    """Runs each job as a Ray task. The files must lie under the same paths on every node (a shared file system)."""

    def __init__(self, address: str) -> None:
        """Connect to the cluster at `address` (``auto``, ``host:6379``, ``ray://host:10001``). Raises RayError."""
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise RayError(f"--ray {address}: Ray is not installed: pip install ray") from error
        _knock(address)
        try:
            if not self._ray.is_initialized():
                self._ray.init(address=address, log_to_driver=False, configure_logging=False)
        except Exception as error:  # Ray raises whatever its transport does
            text = " ".join(str(error).split())
            raise RayError(f"--ray {address}: no Ray cluster can be reached there: {text[:200]}") from error

    def __call__(self, jobs: Sequence[Job], advance: Advance) -> list[Done]:
        """The answers in the order of the jobs; a job whose task fails is a failure of its file."""
        task = self._ray.remote(num_cpus=1)(run_job)
        waiting = {task.remote(job): n for n, job in enumerate(jobs)}
        done: dict[int, Done] = {}
        while waiting:
            finished, _ = self._ray.wait(list(waiting), num_returns=1)
            for reference in finished:
                n = waiting.pop(reference)
                done[n] = self._answer(reference, jobs[n])
                advance(_size(jobs[n]))
        return [done[n] for n in range(len(jobs))]

    def _answer(self, reference: Any, job: Job) -> Done:
        try:
            answer = self._ray.get(reference)
        except Exception as error:  # a lost node, a task that was killed, a package that is missing there
            text = " ".join(str(error).split())
            failure = Failure(job.input.path, f"its Ray task failed ({text[-200:]})", "is this package on every node?")
            return Done(job.input.path, job.input.kind, failure=failure)
        assert isinstance(answer, Done)  # noqa: S101 - what run_job returns
        return answer


def _knock(address: str) -> None:
    """Raise RayError where nobody listens at ``host:port``: Ray itself would try for minutes."""
    match = _HOST_PORT.fullmatch(address)
    if match is None:
        return
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RayError(f"--ray {address}: no Ray cluster can be reached there: {reason}") from error


def _size(job: Job) -> int:
    try:
        return job.input.path.stat().st_size
    except OSError:
        return 0
