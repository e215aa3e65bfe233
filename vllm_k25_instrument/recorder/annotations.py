"""Our ranges' names on the nodes of captured graphs, where PyTorch and the driver can keep them.

No host range exists during a replay, so a torch.profiler trace shows a replayed graph as bare kernels.
`torch.cuda._graph_annotations` (PyTorch 2.13, CUDA 13.1) remembers, by an id that the profiler reports with each
kernel, what was said about a graph's node when it was captured. Its protocol, as read there:

1. ``enable_annotations()`` before the capture;
2. ``mark_kernels(annotation)`` around work, on a stream that is being captured: nodes that appear inside are noted;
3. ``resolve_pending_annotations()`` before the capture ends: of nested marks, the inner one's word counts;
4. ``remap_to_exec_graph(graph)`` once the graph is instantiated, as the profiler knows executables only.

The module is private to PyTorch, so everything here fails open: on the first error the names are given up, and the
capture goes on.
"""

from __future__ import annotations

import importlib
import os
import pickle
from pathlib import Path
from typing import Any, Final

from vllm_k25_instrument.log import logger
from vllm_k25_instrument.markers import range_name
from vllm_k25_instrument.model import HOOKED_CATEGORIES
from vllm_k25_instrument.recorder.step import CODE, DETAIL, LAYER, NBYTES, OpenRange

ANNOTATION_KEY: Final = "vllm_k25"
"""The field of a kernel's ``args``, in an annotated trace, that holds the name of its range."""


def find_annotations() -> GraphAnnotations | None:
    """Annotations where this PyTorch and this ``cuda.bindings`` have them, else None. Does not touch the device."""
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
        module = importlib.import_module("torch.cuda._graph_annotations")
    except Exception:
        return None
    # PyTorch asks the same and warns where the answer is no; nobody who serves a model has to read that.
    return GraphAnnotations(module) if hasattr(runtime, "cudaGraphNodeGetToolsId") else None


def annotations_file_name(rank: int) -> str:
    """Named as PyTorch's tool looks for it: ``kernel_annotations_rank0_k25.pkl``."""
    return f"kernel_annotations_rank{rank}_k25.pkl"


class GraphAnnotations:
    """Names the nodes of one graph after the other. Used by the thread that captures; no method raises."""

    def __init__(self, module: Any) -> None:
        """`module`: `torch.cuda._graph_annotations`, or what behaves like it."""
        self._torch = module
        self._given_up = False
        self._capturing = False
        self._was_enabled = False
        self._resolved: list[int] = []  # ids of the nodes named in a capture whose graph is still to come
        self._scopes: list[tuple[dict[str, str], Any]] = []
        self._done: dict[int, list[Any]] = {}

    def begin(self) -> bool:
        """A graph that we instrument begins to be captured; False where its nodes will not be named."""
        if self._given_up:
            return False
        try:
            self._forget_resolved()
            self._was_enabled = bool(getattr(self._torch, "_annotations_enabled", False))
            self._torch.enable_annotations()
            self._capturing = True
        except Exception as error:
            self._give_up(error)
        return self._capturing

    def open(self) -> None:
        """A range begins on the current stream, inside the capture."""
        if not self._capturing:
            return
        try:
            # PyTorch keeps the dictionary itself: the name goes in when it is known, which for an all-reduce is after
            # its path has reported itself.
            annotation: dict[str, str] = {}
            scope = self._torch.mark_kernels(annotation)
            scope.__enter__()
            self._scopes.append((annotation, scope))
        except Exception as error:
            self._give_up(error)

    def close(self, opened: OpenRange) -> None:
        """The range that was opened last ends: its nodes get its name."""
        if not self._scopes:
            return
        annotation, scope = self._scopes.pop()
        try:
            annotation[ANNOTATION_KEY] = range_name(
                HOOKED_CATEGORIES[opened[CODE]], opened[DETAIL], opened[NBYTES], opened[LAYER]
            )
            scope.__exit__(None, None, None)
        except Exception as error:
            self._give_up(error)

    def discard(self) -> None:
        """The range that was opened last has raised: its capture may be broken, and its nodes not there to be asked."""
        if self._scopes:
            self._scopes.pop()

    def end(self) -> None:
        """The capture is about to end."""
        if not self._capturing:
            return
        self._capturing = False
        self._scopes.clear()
        try:
            annotated = self._torch.get_kernel_annotations()
            before = set(annotated)
            self._torch.resolve_pending_annotations()
            self._resolved = [node for node in annotated if node not in before]
        except Exception as error:
            self._give_up(error)
        finally:
            self._restore()

    def captured(self, graph: Any) -> None:
        """The capture has ended well: `graph` can be replayed."""
        # A graph without a named node must not be remapped: PyTorch would take the one before it for this one.
        if not self._resolved:
            return
        self._resolved = []
        try:
            self._torch.remap_to_exec_graph(graph)
            # PyTorch looks at all annotations at every remap. Out of its sight, a thousand graphs take a thousand
            # times what one takes, and not its square.
            annotated = self._torch.get_kernel_annotations()
            self._done.update(annotated)
            annotated.clear()
        except Exception as error:
            self._give_up(error)

    def abandon(self) -> None:
        """The capture has failed: what was noted in it is nobody's, and must not be taken for the next graph's."""
        self.end()
        try:
            self._forget_resolved()
        except Exception as error:
            self._give_up(error)

    def publish(self, path: Path | None = None) -> None:
        """All graphs are captured: hand the names back to PyTorch and, where there are any, write them to `path`.

        The file is what ``python -m torch.cuda._annotate_cuda_graph_trace TRACE -a FILE`` adds to a trace.
        """
        try:
            annotated = self._torch.get_kernel_annotations()
            annotated.update(self._done)
            self._done = {}
            if path is None or not annotated:
                return
            partial = path.with_suffix(".partial")
            with open(partial, "wb", opener=_private) as file:
                pickle.dump(dict(annotated), file)
            partial.replace(path)
            logger.info("K25: names of %d graph nodes, for torch.profiler traces: %s", len(annotated), path)
        except Exception as error:
            logger.warning("K25: the names of graph nodes cannot be written to %s: %s", path, error)

    def _forget_resolved(self) -> None:
        """Their capture gave no graph."""
        annotated = self._torch.get_kernel_annotations()
        for node in self._resolved:
            annotated.pop(node, None)
        self._resolved = []

    def _restore(self) -> None:
        """Annotations are on in captures of ours only, unless somebody else had turned them on."""
        if not self._was_enabled:
            try:
                self._torch.disable_annotations()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self._given_up:
            return
        self._given_up = True
        self._capturing = False
        self._resolved = []
        self._scopes.clear()
        logger.warning("K25: graph nodes are not named for torch.profiler: %s: %s", type(error).__name__, error)
        self._restore()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
