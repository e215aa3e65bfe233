"""The entry point of ``vllm.general_plugins``: runs in every process of a vLLM server, some of them twice.

Where vLLM's source has been patched, `patched` calls `start` from there, whether vLLM loads plugins or not.

Off unless ``K25_INSTRUMENT=1``. Then, by role of the process: the front end makes the instance's folder and puts the
metrics into /metrics, a process in which vLLM constructs a Worker gets the hooks and a ring, and the engine's core
gets nothing. This module imports nothing heavy, and nothing here may raise: vLLM starts whatever happens to us.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from vllm_k25_instrument.log import logger

if TYPE_CHECKING:
    from vllm_k25_instrument.settings import Settings
    from vllm_k25_instrument.worker import WorkerInstrument

_SWITCH: Final = "K25_INSTRUMENT"
_RAY_PREFIXES: Final = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
_WORKER_MODULE: Final = "vllm.v1.worker.worker_base"
_MARK: Final = "__k25_watched__"


if "_Process" not in globals():  # what has been started stays known when the module is reloaded

    class _Process:
        """What has been started in this process. One per process: plugins are loaded more than once."""

        registered = False
        settings: Settings | None = None  # of a process that is instrumented
        hooks = False  # vLLM has loaded us as a plugin: its functions may be replaced, not only those that are marked
        instance_fd: int | None = None
        worker: WorkerInstrument | None = None


def register() -> None:
    """Start what this process's role asks for. Idempotent; never raises."""
    start(hooks=True)


def switched_on() -> bool:
    """Whether the environment turns the instrument on."""
    return os.environ.get(_SWITCH, "0").strip().lower() not in ("", "0", "false", "off", "no")


def start(*, hooks: bool) -> None:
    """`register`; without `hooks` what is not marked in vLLM's source stays as it is, unless `register` follows."""
    if not switched_on():
        return
    try:
        if not _Process.registered:
            _Process.registered = True
            _register()
        if hooks and not _Process.hooks and _Process.settings is not None:
            _Process.hooks = True
            _when_a_worker_is_constructed()
    except Exception:
        logger.exception("K25: the instrument could not be started; vLLM goes on without it")


def _register() -> None:
    from vllm_k25_instrument.settings import SettingsError, load_settings

    try:
        settings = load_settings()
    except SettingsError as error:
        logger.error("K25: not instrumenting: %s", error)
        _turn_off_in_children()
        return
    if not settings.instrument:
        return
    _warn_of_unknown_variables()
    if not _ensure_instance(settings):
        _turn_off_in_children()
        return
    _copy_to_ray_workers()
    _Process.settings = settings
    if _is_front_end():
        _start_metrics(settings)


def _turn_off_in_children() -> None:
    """What is wrong here is wrong for the whole server: said once, not by every worker."""
    os.environ[_SWITCH] = "0"


def _warn_of_unknown_variables() -> None:
    from vllm_k25_instrument.settings import unknown_variables

    if _inherits_instance():
        return
    for name, meant in unknown_variables(os.environ).items():
        logger.warning("K25: %s is not a setting and is ignored%s", name, f"; did you mean {meant}?" if meant else "")


def _inherits_instance() -> bool:
    """Whether this process belongs to a server whose first process has made the instance.

    A main process starts a server of its own, even where it was started from inside another one's environment; a
    Ray worker is a main process too, but one that was handed an instance. A name with our own pid is our own: the
    module was loaded a second time.
    """
    from vllm_k25_instrument.instances import INSTANCE_VARIABLE

    name = os.environ.get(INSTANCE_VARIABLE, "")
    started_by_a_server = multiprocessing.parent_process() is not None or _is_ray_worker()
    return bool(name) and (started_by_a_server or name.endswith(f"-{os.getpid()}"))


def _is_ray_worker() -> bool:
    return "RAY_JOB_ID" in os.environ


def _is_front_end() -> bool:
    """Whether requests may arrive here: the main process, or one of several API servers."""
    return multiprocessing.parent_process() is None or "ApiServer" in multiprocessing.current_process().name


def _ensure_instance(settings: Settings) -> bool:
    """The instance that this process belongs to: its parent's, or a new one. False where there can be none."""
    from vllm_k25_instrument.instances import INSTANCE_VARIABLE, create_instance, join_instance, launched_together

    if _inherits_instance():
        return True
    try:
        together = launched_together()
        if together:
            created, _Process.instance_fd = join_instance(settings.ring_dir, together, settings.ring_keep)
        else:
            created, _Process.instance_fd = create_instance(settings.ring_dir, settings.ring_keep)
    except OSError as error:
        logger.error(
            "K25: not instrumenting: cannot use K25_RING_DIR=%s (%s); set it to a writable directory on a local tmpfs",
            settings.ring_dir,
            error.strerror or error,
        )
        return False
    os.environ[INSTANCE_VARIABLE] = created.name
    return True


def _copy_to_ray_workers() -> None:
    """Ray hands only known prefixes of environment variables to vLLM's workers; ours must be one."""
    prefixes = [p.strip() for p in os.environ.get(_RAY_PREFIXES, "").split(",") if p.strip()]
    if "K25_" not in prefixes:
        os.environ[_RAY_PREFIXES] = ",".join([*prefixes, "K25_"])


def _when_a_worker_is_constructed() -> None:
    import wrapt

    def watch(module: ModuleType) -> None:
        try:
            _watch_worker_class(module.WorkerBase)
        except Exception:
            logger.exception("K25: cannot watch vLLM's workers; they are not instrumented")

    wrapt.register_post_import_hook(watch, _WORKER_MODULE)


def _watch_worker_class(worker_class: Any) -> None:
    constructor = worker_class.__init__
    if not hasattr(constructor, _MARK):
        worker_class.__init__ = watched(constructor)


def watched(constructor: Callable[..., None]) -> Callable[..., None]:
    """The constructor of vLLM's workers, which has the process instrumented when it is done."""
    import functools

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        if _Process.settings is not None:
            start_worker(_Process.settings, self)

    setattr(construct, _MARK, True)
    return construct


def start_worker(settings: Settings, worker: Any) -> None:
    """Instrument this process, in which vLLM has just constructed `worker`. Idempotent; never raises."""
    if _Process.worker is not None:
        _Process.worker.another(worker)
        return
    try:
        from vllm_k25_instrument.instances import INSTANCE_VARIABLE, remove_dead_instances
        from vllm_k25_instrument.worker import WorkerInstrument

        if _is_ray_worker():  # perhaps on a machine where no front end clears up
            remove_dead_instances(settings.ring_dir, settings.ring_keep)
        instrument = WorkerInstrument(settings, os.environ[INSTANCE_VARIABLE], worker, hooks=_Process.hooks)
        _Process.worker = instrument
        instrument.start()
    except OSError as error:
        logger.error("K25: rank not instrumented: no ring in K25_RING_DIR=%s (%s)", settings.ring_dir, error)
    except Exception:
        logger.exception("K25: rank not instrumented; vLLM goes on without us")


def _start_metrics(settings: Settings) -> None:
    from vllm_k25_instrument.instances import INSTANCE_VARIABLE

    if settings.metrics == "off":
        return
    from vllm_k25_instrument.export.in_vllm import register_in_vllm

    register_in_vllm(settings, settings.ring_dir / os.environ[INSTANCE_VARIABLE])
