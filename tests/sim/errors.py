"""What CUDA and PyTorch say when they refuse: texts of `cudaGetErrorString` and of PyTorch's checks."""

from __future__ import annotations

from typing import Final

try:
    from torch import OutOfMemoryError as OutOfMemoryError
except ImportError:  # the simulator itself does not need PyTorch

    class OutOfMemoryError(RuntimeError):  # type: ignore[no-redef]
        pass


INVALID_VALUE: Final = "cudaErrorInvalidValue"
MEMORY_ALLOCATION: Final = "cudaErrorMemoryAllocation"
INVALID_HANDLE: Final = "cudaErrorInvalidResourceHandle"
ILLEGAL_STATE: Final = "cudaErrorIllegalState"
NOT_READY: Final = "cudaErrorNotReady"
LAUNCH_FAILURE: Final = "cudaErrorLaunchFailure"
CAPTURE_UNSUPPORTED: Final = "cudaErrorStreamCaptureUnsupported"
CAPTURE_INVALIDATED: Final = "cudaErrorStreamCaptureInvalidated"
CAPTURE_MERGE: Final = "cudaErrorStreamCaptureMerge"
CAPTURE_UNMATCHED: Final = "cudaErrorStreamCaptureUnmatched"
CAPTURE_UNJOINED: Final = "cudaErrorStreamCaptureUnjoined"
CAPTURE_ISOLATION: Final = "cudaErrorStreamCaptureIsolation"
CAPTURE_WRONG_THREAD: Final = "cudaErrorStreamCaptureWrongThread"
CAPTURED_EVENT: Final = "cudaErrorCapturedEvent"

MESSAGES: Final = {
    INVALID_VALUE: "invalid argument",
    MEMORY_ALLOCATION: "out of memory",
    INVALID_HANDLE: "invalid resource handle",
    ILLEGAL_STATE: "the operation cannot be performed in the present state",
    NOT_READY: "device not ready",
    LAUNCH_FAILURE: "unspecified launch failure",
    CAPTURE_UNSUPPORTED: "operation not permitted when stream is capturing",
    CAPTURE_INVALIDATED: "operation failed due to a previous error during capture",
    CAPTURE_MERGE: "operation would result in a merge of separate capture sequences",
    CAPTURE_UNMATCHED: "capture was not ended in the same stream as it began",
    CAPTURE_UNJOINED: "capturing stream has unjoined work",
    CAPTURE_ISOLATION: "dependency created on uncaptured work in another stream",
    CAPTURE_WRONG_THREAD: "attempt to terminate a thread-local capture sequence from another thread",
    CAPTURED_EVENT: "operation not permitted on an event last recorded in a capturing stream",
}


class CudaError(RuntimeError):
    """An error code of the CUDA runtime, raised as PyTorch raises it."""

    def __init__(self, code: str) -> None:
        super().__init__(f"CUDA error: {MESSAGES[code]}\nSearch for `{code}' in the CUDA runtime's documentation.")
        self.code = code


class UndefinedError(RuntimeError):
    """The real thing would not refuse, but what it does is undefined, or not simulated here."""
