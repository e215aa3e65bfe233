"""Resolves, wraps, unwraps and reports hook points.

Lazy: a target is patched when vLLM imports its module, so that we import none of vLLM's heavy modules and miss none
that comes late. Fail open: whatever goes wrong here is logged once and costs that hook, nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Final

import wrapt
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_k25_instrument.hooks.names import HOOK_NAMES
from vllm_k25_instrument.hooks.point import HookKind, HookPoint, HookState
from vllm_k25_instrument.hooks.wrappers import ADOPTED, Function, after_construction, unbound, wrap
from vllm_k25_instrument.log import logger
from vllm_k25_instrument.model import Category
from vllm_k25_instrument.recorder.recorder import Recorder

_MARK: Final = "__k25_hook__"

# The worst state first: what a hook's several targets add up to is the best of their states.
_RANKING: Final = (
    HookState.OFF,
    HookState.NOT_IN_VERSION,
    HookState.WAITING,
    HookState.MISSING,
    HookState.QUIET,
    HookState.ATTACHED,
)


class Patcher:
    """Puts the hook points of one process in place."""

    def __init__(
        self,
        points: Iterable[HookPoint],
        recorder: Recorder,
        *,
        vllm_version: str,
        categories: frozenset[Category],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called whenever the states of the hooks have changed."""
        self._recorder = recorder
        self._on_change = on_change
        self._replaced: list[tuple[Any, str, Any, Function]] = []  # owner, name, original, our wrapper
        self._subclass_hooks: dict[type, list[Callable[[type], None]]] = {}
        self._states: dict[HookPoint, HookState] = {
            point: _initial_state(point, vllm_version, categories, graphs=recorder.graphs is not None)
            for point in points
        }

    @property
    def states(self) -> dict[HookPoint, HookState]:
        """State of each hook point."""
        return dict(self._states)

    def states_by_name(self) -> dict[str, str]:
        """State of each hook: the best that any of its targets has reached."""
        best: dict[str, HookState] = {}
        for point, state in self._states.items():
            known = best.get(point.name)
            if known is None or _RANKING.index(state) > _RANKING.index(known):
                best[point.name] = state
        return {name: str(best[name]) for name in HOOK_NAMES if name in best}

    def install(self) -> None:
        """Attach what is there, and arrange for the rest to be attached on import."""
        for module in {point.module: None for point in self._waiting()}:
            wrapt.register_post_import_hook(self._module_imported, module)

    def retry(self) -> None:
        """Look again for targets that were not there while their module was still being imported."""
        for point in [
            p for p, state in self._states.items() if state is HookState.MISSING or state is HookState.WAITING
        ]:
            module = sys.modules.get(point.module)
            if module is not None:
                self._attach(point, module)
        self._on_change()

    def uninstall(self) -> None:
        """Put every original back. Modules not imported yet stay unpatched, as nothing waits any more.

        Where somebody has wrapped our wrapper in the meantime, theirs stays, and ours does nothing inside it.
        """
        for point in self._states:
            self._recorder.silence(point)
        for owner, name, original, wrapper in reversed(self._replaced):
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
        self._replaced.clear()
        self._subclass_hooks.clear()
        self._states = dict.fromkeys(self._states, HookState.OFF)

    def quiet(self, point: HookPoint) -> None:
        """Take a point out of service whose own code has failed: vLLM's function is back, or as good as back."""
        self._states[point] = HookState.QUIET
        self._recorder.silence(point)
        for owner, name, original, wrapper in self._replaced:
            if vars(owner).get(name) is wrapper and getattr(wrapper, _MARK, None) is point:
                setattr(owner, name, original)
        self._on_change()

    def _waiting(self) -> list[HookPoint]:
        return [point for point, state in self._states.items() if state is HookState.WAITING]

    def _module_imported(self, module: ModuleType) -> None:
        for point in [p for p in self._waiting() if p.module == module.__name__]:
            self._attach(point, module)
        self._on_change()

    def _attach(self, point: HookPoint, module: ModuleType) -> None:
        try:
            state = self._attach_to(point, module)
        except Exception:
            logger.exception("K25: hook %s (%s) could not be attached; vLLM goes on without it", point.name, point.id)
            state = HookState.MISSING
        self._states[point] = state

    def _attach_to(self, point: HookPoint, module: ModuleType) -> HookState:
        owner: Any = module
        *path, name = point.target.split(".")
        for part in path:
            owner = getattr(owner, part, None)
            if owner is None:
                return HookState.MISSING
        if point.kind is HookKind.SHARED_EXPERTS:
            return self._adopt_shared_experts(point, owner)
        if point.subclasses and isinstance(owner, type):
            return self._attach_to_family(point, owner, name)
        return HookState.ATTACHED if self._wrap_attribute(owner, name, point) else HookState.MISSING

    def _wrap_attribute(self, owner: Any, name: str, point: HookPoint) -> bool:
        """Wrap the function `name` that `owner` itself defines; True where it is wrapped (now or before).

        Plain functions only, and those that another plugin has wrapped with wrapt.
        """
        found = vars(owner).get(name)
        if getattr(found, _MARK, None) is not None:
            return True
        if getattr(found, "__isabstractmethod__", False):
            return False
        if type(found) is FunctionType:  # isinstance is true of wrapt's proxies too
            self._replace(owner, name, wrap(found, point, self._recorder), point)
        elif isinstance(found, wrapt.FunctionWrapper) and isinstance(owner, type):
            self._replace(owner, name, wrap(unbound(found), point, self._recorder), point)
        else:
            return False
        return True

    def _attach_to_family(self, point: HookPoint, root: type, name: str) -> HookState:
        """Wrap `name` wherever `root` or a subclass defines it, and in the subclasses still to be defined."""
        if not callable(getattr(root, name, None)):
            return HookState.MISSING

        def wrap_in(cls: type) -> None:
            if self._states[point] is not HookState.QUIET:
                self._wrap_attribute(cls, name, point)

        for cls in _family(root):
            wrap_in(cls)
        if root not in self._subclass_hooks:
            self._subclass_hooks[root] = []
            _watch_subclasses(root, self._subclass_hooks[root])
        self._subclass_hooks[root].append(wrap_in)
        return HookState.ATTACHED

    def _adopt_shared_experts(self, point: HookPoint, owner: type) -> HookState:
        """Time the model's own shared-experts module, whatever its class and wherever vLLM calls it from.

        vLLM keeps it in a wrapper that runs it inline or on a side stream; only the module's own call is on the
        stream that does the work. Its class may also serve dense layers, so only adopted instances are timed.
        """

        def adopt(layer: Any) -> None:
            self._wrap_attribute(type(layer), "forward", point)
            layer.__dict__[ADOPTED] = True

        constructor = vars(owner).get("__init__")
        if getattr(constructor, _MARK, None) is not None:
            return HookState.ATTACHED
        if not isinstance(constructor, FunctionType):
            return HookState.MISSING
        self._replace(owner, "__init__", after_construction(constructor, point, adopt), point)
        return HookState.ATTACHED

    def _replace(self, owner: Any, name: str, wrapper: Function, point: HookPoint) -> None:
        self._replaced.append((owner, name, vars(owner)[name], wrapper))
        setattr(wrapper, _MARK, point)
        setattr(owner, name, wrapper)


def _initial_state(point: HookPoint, vllm_version: str, categories: frozenset[Category], *, graphs: bool) -> HookState:
    if point.category is not None and point.category not in categories:
        return HookState.OFF
    if point.kind is HookKind.GRAPHS and not graphs:
        return HookState.OFF
    if not exists_in(point, vllm_version):
        return HookState.NOT_IN_VERSION
    return HookState.WAITING


def exists_in(point: HookPoint, vllm_version: str) -> bool:
    """Whether the table says that this vLLM has the target."""
    return not point.versions or version_matches(vllm_version, point.versions)


def version_matches(vllm_version: str, specifier: str) -> bool:
    """Whether a version of vLLM is in `specifier` (PEP 440). A version that cannot be read counts as the newest."""
    try:
        version = Version(vllm_version)
    except InvalidVersion:
        version = Version("999")
    return SpecifierSet(specifier, prereleases=True).contains(version.base_version)


def _family(root: type) -> Iterator[type]:
    """`root` and all its subclasses, each once."""
    seen = {root}
    todo = [root]
    while todo:
        cls = todo.pop()
        yield cls
        subclasses: list[type] = type.__subclasses__(cls)
        new = [sub for sub in subclasses if sub not in seen]
        seen.update(new)
        todo += new


def _watch_subclasses(root: type, callbacks: list[Callable[[type], None]]) -> None:
    """Call `callbacks` with every subclass of `root` that is defined from now on."""
    own = vars(root).get("__init_subclass__")

    def __init_subclass__(cls: type, **kwargs: Any) -> None:  # noqa: N807
        if own is not None:
            own.__get__(None, cls)(**kwargs)
        else:
            super(root, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        for callback in callbacks:
            callback(cls)

    root.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment, arg-type]
