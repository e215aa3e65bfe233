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

from vllm_k25_instrument.hooks import marks
from vllm_k25_instrument.hooks.marks import HOOK_MARK, Mark
from vllm_k25_instrument.hooks.names import HOOK_NAMES
from vllm_k25_instrument.hooks.point import HookKind, HookPoint, HookState
from vllm_k25_instrument.hooks.wrappers import ADOPTED, Function, after_construction, unbound, wrap
from vllm_k25_instrument.log import logger
from vllm_k25_instrument.model import Category
from vllm_k25_instrument.recorder.recorder import Recorder

# What a hook's several targets add up to is the last of their states here: in use where one of them is, but quiet where
# one of them is, since what that one timed is known to be left out from then on.
_RANKING: Final = (
    HookState.OFF,
    HookState.NOT_IN_VERSION,
    HookState.WAITING,
    HookState.MISSING,
    HookState.ATTACHED,
    HookState.QUIET,
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
        replaces: bool = True,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called whenever the states of the hooks have changed.

        Without `replaces` only functions that vLLM's own source marks are wrapped, and no function of vLLM's is
        replaced, save `forward` of the module that serves as shared experts, which no source names.
        """
        self._recorder = recorder
        self._replaces = replaces
        self._on_change = on_change
        self._replaced: list[tuple[Any, str, Any, Function]] = []  # owner, name, original, our wrapper
        self._marked: list[tuple[HookPoint, Mark]] = []
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
        """State of each hook: quiet where any of its targets is, else the best that any of them has reached."""
        states: dict[str, HookState] = {}
        for point, state in self._states.items():
            known = states.get(point.name)
            if known is None or _RANKING.index(state) > _RANKING.index(known):
                states[point.name] = state
        return {name: str(states[name]) for name in HOOK_NAMES if name in states}

    def install(self) -> None:
        """Attach what is there, and arrange for the rest to be attached on import."""
        marks.listen(self._wrap_marked)
        if not self._replaces:
            return
        for module in {point.module: None for point in self._waiting()}:
            wrapt.register_post_import_hook(self._module_imported, module)

    def retry(self) -> None:
        """Look again for targets that were not there while their module was still being imported."""
        for point in [
            p for p, state in self._states.items() if state is HookState.MISSING or state is HookState.WAITING
        ]:
            module = sys.modules.get(point.module)
            if module is None:
                continue
            if self._replaces:
                self._attach(point, module)
            elif not point.subclasses:  # of a family, the module that is wanted may be yet to come
                self._states[point] = HookState.MISSING
        self._on_change()

    def uninstall(self) -> None:
        """Put every original back. Modules not imported yet stay unpatched, as nothing waits any more.

        Where somebody has wrapped our wrapper in the meantime, theirs stays, and ours does nothing inside it.
        """
        for point in self._states:
            self._recorder.silence(point)
        marks.listen(None)
        for _, mark in self._marked:
            mark.remove()
        self._marked.clear()
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
        for wrapped, mark in self._marked:
            if wrapped is point:
                mark.remove()
        for owner, name, original, wrapper in self._replaced:
            if vars(owner).get(name) is wrapper and getattr(wrapper, HOOK_MARK, None) is point:
                setattr(owner, name, original)
        self._on_change()

    def _waiting(self) -> list[HookPoint]:
        return [point for point, state in self._states.items() if state is HookState.WAITING]

    def _module_imported(self, module: ModuleType) -> None:
        for point in [p for p in self._waiting() if p.module == module.__name__]:
            self._attach(point, module)
        self._on_change()

    def _wrap_marked(self, mark: Mark) -> None:
        """Put the wrapper into a function that vLLM's source marks, now or while its module is being imported."""
        try:
            point = self._point_of(mark)
            if point is None or self._states[point] not in (HookState.WAITING, HookState.MISSING, HookState.ATTACHED):
                return
            if point.kind is HookKind.SHARED_EXPERTS:
                mark.put(self._adopting(mark.function, point))
            else:
                mark.put(wrap(mark.function, point, self._recorder))
            self._marked.append((point, mark))
            # With the plugin the state is for `_attach` to tell: there may be more to wrap than what is marked.
            if not self._replaces and self._states[point] is not HookState.ATTACHED:
                self._states[point] = HookState.ATTACHED
                self._on_change()
        except Exception:
            logger.exception("K25: the mark %s on %r goes unused", mark.hook, mark.function)

    def _point_of(self, mark: Mark) -> HookPoint | None:
        """The point of the table that a mark stands for: its own target's, else that of the family it belongs to."""
        function = mark.function
        named = [point for point in self._states if point.name == mark.hook]
        for point in named:
            if point.id == f"{function.__module__}:{function.__qualname__}":
                return point
        for point in named:
            owner, _, name = point.target.rpartition(".")
            if name == function.__name__ and (point.subclasses or not owner):
                return point
        logger.warning(
            "K25: vLLM's source marks %s.%s for hook %s, which is not known here; were the patches made for another "
            "version of vllm-k25-instrument?",
            function.__module__,
            function.__qualname__,
            mark.hook,
        )
        return None

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
        if getattr(found, HOOK_MARK, None) is not None:
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
        constructor = vars(owner).get("__init__")
        if getattr(constructor, HOOK_MARK, None) is not None:
            return HookState.ATTACHED
        if not isinstance(constructor, FunctionType):
            return HookState.MISSING
        self._replace(owner, "__init__", self._adopting(constructor, point), point)
        return HookState.ATTACHED

    def _adopting(self, constructor: Function, point: HookPoint) -> Function:
        """Time the model's own shared-experts module, whatever its class and wherever vLLM calls it from.

        vLLM keeps it in a wrapper that runs it inline or on a side stream; only the module's own call is on the
        stream that does the work. Its class may also serve dense layers, so only adopted instances are timed.
        """

        def adopt(layer: Any) -> None:
            self._wrap_attribute(type(layer), "forward", point)
            layer.__dict__[ADOPTED] = True

        return after_construction(constructor, point, adopt)

    def _replace(self, owner: Any, name: str, wrapper: Function, point: HookPoint) -> None:
        self._replaced.append((owner, name, vars(owner)[name], wrapper))
        setattr(wrapper, HOOK_MARK, point)
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
