"""A hook point is data: what is wrapped, in which versions of vLLM, and what its range is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm_k25_instrument.hooks.names import HOOK_INDEX
from vllm_k25_instrument.model import CATEGORY_CODE, AllReducePath, Category

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class HookKind(StrEnum):
    """What the wrapper does with the call."""

    STEP = "step"  # a step begins; it ends here when the call returns a result
    STEP_SAMPLING = "step_sampling"  # the step ends when this call returns
    GRAPH_DISPATCH = "graph_dispatch"  # the result says how the step will run
    RANGE = "range"  # the call is a range
    PATH = "path"  # the call is the path that the open all-reduce takes
    LAYER = "layer"  # the call tells which layer we are in
    IDLE = "idle"  # the worker has answered, and is about to wait for its next message
    GRAPHS = "graphs"  # the call captures, replays or drops CUDA graphs
    SHARED_EXPERTS = "shared_experts"  # the constructor of vLLM's wrapper around a model's shared experts


class HookState(StrEnum):
    """What became of a hook point."""

    WAITING = "waiting"  # its module has not been imported yet
    ATTACHED = "attached"
    MISSING = "missing"  # the module is there, the target is not (or is no plain function)
    NOT_IN_VERSION = "not_in_version"  # by the table, this vLLM has no such target
    OFF = "off"  # its category was not asked for
    QUIET = "quiet"  # detached in effect, after an error in our own code


@dataclass(frozen=True, slots=True, eq=False)
class HookPoint:
    """One place in vLLM that is wrapped.

    `target` is ``Class.method`` or ``function`` inside `module`. With `subclasses`, the method is wrapped in every
    subclass that defines it, those defined later included. `versions` is a PEP 440 specifier: where the table
    says that the target exists. The functions take the call's ``(args, kwargs)``, args[0] being ``self``:
    `detail` makes the range's detail ("" = not known before a PATH hook says it), `nbytes` the size of the message,
    `layer` the layer's number (None = the range inherits the layer seen last in this step). `path` is what a PATH hook
    reports, from the same arguments. `graphs` makes a GRAPHS wrapper, from the function and the worker's `TimedGraphs`.
    `none_is_refusal` says that a call returning None did not do the work. `shared_experts` finds the module to time in
    the arguments of the constructor that a SHARED_EXPERTS hook wraps (None = this one has none).

    Points are compared by identity: each is one row of the table.
    """

    name: str
    kind: HookKind
    module: str
    target: str
    versions: str = ""
    category: Category | None = None
    subclasses: bool = False
    detail: Callable[[Args, Kwargs], str] | None = None
    nbytes: Callable[[Args, Kwargs], int] | None = None
    layer: Callable[[Args, Kwargs], int] | None = None
    inherits_layer: bool = False
    path: Callable[[Args, Kwargs], AllReducePath] | None = None
    graphs: Callable[[Callable[..., Any], Any], Callable[..., Any]] | None = None
    none_is_refusal: bool = False
    shared_experts: Callable[[Args, Kwargs], Any] | None = None

    code: int = field(init=False, default=-1)
    """The category's code (-1: no range)."""
    index: int = field(init=False, default=-1)
    """Index of the hook's counters in a ring's totals."""

    def __post_init__(self) -> None:
        if self.name not in HOOK_INDEX:
            raise ValueError(f"{self.name} is not in the closed set of hook names")
        if (self.category is None) == (self.kind is HookKind.RANGE or self.kind is HookKind.SHARED_EXPERTS):
            raise ValueError(f"{self.name}: a range has a category, nothing else has one")
        # Looked up once: enumeration members hash in Python, too slow for every call.
        object.__setattr__(self, "index", HOOK_INDEX[self.name])
        if self.category is not None:
            object.__setattr__(self, "code", CATEGORY_CODE[self.category])

    @property
    def id(self) -> str:
        """Unique name of this target: ``module:target``."""
        return f"{self.module}:{self.target}"
