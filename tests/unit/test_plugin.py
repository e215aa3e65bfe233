"""What the plugin starts in which process, and that vLLM starts whatever happens to it."""

from __future__ import annotations

import json
import os
import textwrap

import pytest

from tests.export_rings import kill, make_ring
from tests.samples import run_python
from vllm_k25_instrument.instances import INSTANCE_VARIABLE, list_instances
from vllm_k25_instrument.ring import open_rings

HEAVY = ("torch", "vllm", "pydantic", "pydantic_settings", "prometheus_client", "rich", "typer", "jinja2", "numpy")
NOT_FOR_WORKERS = ("prometheus_client", "rich", "typer", "jinja2", "opentelemetry")

REGISTER = "from vllm_k25_instrument.plugin import register; register()"

WORKER_BASE = '''
class WorkerBase:
    """As much of vLLM's as the plugin sees."""

    def __init__(self, vllm_config, local_rank, rank, distributed_init_method="", is_driver_worker=False):
        self.vllm_config, self.local_rank, self.rank = vllm_config, local_rank, rank
'''

PLATFORM = """
from types import SimpleNamespace
current_platform = SimpleNamespace(device_type="cpu", is_cuda=lambda: False, is_cuda_alike=lambda: False)
"""

CONSTRUCT = """
from types import SimpleNamespace as Some
from vllm.v1.worker.worker_base import WorkerBase
class Worker(WorkerBase):
    pass
parallel = Some(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, data_parallel_rank=0)
config = Some(model_config=Some(served_model_name="k25", model="m"), parallel_config=parallel)
worker = Worker(config, local_rank=1, rank=1)
"""


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "rings"


@pytest.fixture
def stand_in(tmp_path):
    """A folder with a package `vllm` that has a WorkerBase, a platform, and nothing else."""
    package = tmp_path / "stand-in" / "vllm" / "v1" / "worker"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "worker_base.py").write_text(WORKER_BASE)
    (package.parent.parent / "version.py").write_text("__version__ = '0.32.0'\n")
    (package.parent.parent / "platforms.py").write_text(PLATFORM)
    return tmp_path / "stand-in"


def run(code, directory=None, **environment):
    """Run `code` with the plugin on; what it prints and what it logs, line by line."""
    variables = {"K25_INSTRUMENT": "1", "K25_METRICS": "off"}
    if directory is not None:
        variables["K25_RING_DIR"] = str(directory)
    result = run_python(textwrap.dedent(code), **(variables | environment))
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines(), result.stderr.splitlines()


# --- off ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", [None, "", "0", "false", "OFF", " no "])
def test_off_it_imports_nothing_and_changes_nothing(directory, switch):
    code = f"""
        import os, sys
        before = dict(os.environ)
        {REGISTER}
        heavy = [name for name in {HEAVY!r} if name in sys.modules]
        ours = [name for name in sys.modules if name.startswith("vllm_k25_instrument.")]
        print(heavy, sorted(ours), dict(os.environ) == before)
    """
    printed, logged = run(code, directory, K25_INSTRUMENT=switch)
    assert printed == ["[] ['vllm_k25_instrument.log', 'vllm_k25_instrument.plugin'] True"]
    assert logged == []
    assert not directory.exists()


def test_off_in_a_way_that_only_the_settings_understand_it_patches_nothing(directory):
    code = f"""
        import os, sys
        {REGISTER}
        print("wrapt" in sys.modules, "{INSTANCE_VARIABLE}" in os.environ)
    """
    assert run(code, directory, K25_INSTRUMENT="n") == (["False False"], [])
    assert not directory.exists()


def test_importing_the_plugin_imports_nothing_heavy():
    code = f"""
        import sys
        import vllm_k25_instrument.plugin
        print([name for name in {(*HEAVY, "wrapt")!r} if name in sys.modules])
    """
    assert run(code) == (["[]"], [])


# --- on ----------------------------------------------------------------------------------------------------


def test_on_it_makes_an_instance_and_imports_neither_torch_nor_vllm(directory):
    code = f"""
        import os, sys
        {REGISTER}
        print([name for name in ("torch", "vllm", *{NOT_FOR_WORKERS!r}) if name in sys.modules])
        print(os.environ["{INSTANCE_VARIABLE}"], os.getpid())
    """
    (imported, line), logged = run(code, directory)
    name, pid = line.split()
    assert imported == "[]"
    assert name.endswith(f"-{pid}")
    assert [instance.name for instance in list_instances(directory)] == [name]
    assert logged == []


TWICE = {
    "registered twice": "register()",
    "reloaded": "import importlib, vllm_k25_instrument.plugin as p; importlib.reload(p).register()",
    "imported again": "import sys; del sys.modules['vllm_k25_instrument.plugin'];"
    " import vllm_k25_instrument.plugin as p; p.register()",
}


@pytest.mark.parametrize("again", TWICE.values(), ids=TWICE.keys())
def test_twice_is_once(directory, stand_in, again):
    code = f"""
        import os
        {REGISTER}
        before = dict(os.environ)
        {again}
        assert dict(os.environ) == before
        {textwrap.indent(CONSTRUCT, " " * 8).strip()}
        Worker(config, local_rank=1, rank=1)
        print(type(worker).__mro__[1].__init__.__wrapped__.__code__.co_filename.endswith("worker_base.py"))
        print(hasattr(WorkerBase.__init__.__wrapped__, "__wrapped__"))
        {again}
    """
    printed, logged = run(code, directory, PYTHONPATH=str(stand_in))
    assert printed == ["True", "False"]
    assert logged == []
    (instance,) = list_instances(directory)
    (reader,), errors = open_rings(instance.path)
    assert errors == []
    assert reader.identity.coordinates.global_rank == 1


def test_a_worker_gets_a_ring_when_vllm_constructs_it_and_keeps_what_its_constructor_does(directory, stand_in):
    code = f"""
        {REGISTER}
        {textwrap.indent(CONSTRUCT, " " * 8).strip()}
        from vllm_k25_instrument import plugin
        print(worker.rank, worker.vllm_config is config, plugin._Process.worker.ring.path.exists())
        print(WorkerBase.__init__.__name__, WorkerBase.__init__.__module__)
    """
    printed, _ = run(code, directory, PYTHONPATH=str(stand_in), K25_SAMPLE_EVERY="3")
    assert printed == ["1 True True", "__init__ vllm.v1.worker.worker_base"]
    (instance,) = list_instances(directory)
    (reader,), _ = open_rings(instance.path)
    assert reader.identity.instance == instance.name
    assert reader.identity.model == "k25"
    assert reader.identity.sample_every == 3
    assert not reader.alive


def test_a_worker_whose_module_was_imported_first_is_instrumented_too(directory, stand_in):
    code = f"""
        import vllm.v1.worker.worker_base
        {REGISTER}
        {textwrap.indent(CONSTRUCT, " " * 8).strip()}
    """
    run(code, directory, PYTHONPATH=str(stand_in))
    (instance,) = list_instances(directory)
    assert len(open_rings(instance.path)[0]) == 1


# --- what can go wrong -------------------------------------------------------------------------------------


WRONG = [
    ("K25_SAMPLE_EVERY", "often", "must be a whole number from 1 to 1000000"),
    ("K25_INSTRUMENT", "maybe", "must be 1 or 0"),
    ("K25_METRICS", "yes", "must be one of: auto, off"),
    ("K25_CATEGORIES", "everything", "allowed: all, all_reduce"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_wrong_setting_is_one_line_and_the_server_starts_without_us(directory, stand_in, name, value, allowed):
    code = f"""
        import os, sys
        {REGISTER}
        register()
        print("wrapt" in sys.modules, "{INSTANCE_VARIABLE}" in os.environ)
        {textwrap.indent(CONSTRUCT, " " * 8).strip()}
        print(worker.rank)
    """
    printed, logged = run(code, directory, PYTHONPATH=str(stand_in), **{name: value})
    assert printed == ["False False", "1"]
    (line,) = logged
    assert line.startswith(f"K25: not instrumenting: {name}={value!r}: ")
    assert allowed in line
    assert not directory.exists()


def unusable(tmp_path):
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    return {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "rings",
        "a link": tmp_path / "link",
        "a shared directory": tmp_path / "shared",
        "in /proc": "/proc/k25",
        "in /sys": "/sys/k25",
        "a device": "/dev/null",
    }


@pytest.mark.parametrize(
    "where", ["a file", "below a file", "a link", "a shared directory", "in /proc", "in /sys", "a device"]
)
def test_a_directory_that_cannot_be_used_is_one_line_and_the_server_starts_without_us(tmp_path, stand_in, where):
    directory = unusable(tmp_path)[where]
    code = f"""
        import os
        {REGISTER}
        register()
        {textwrap.indent(CONSTRUCT, " " * 8).strip()}
        print(worker.rank, "{INSTANCE_VARIABLE}" in os.environ)
    """
    printed, logged = run(code, directory, PYTHONPATH=str(stand_in))
    assert printed == ["1 False"]
    (line,) = logged
    assert line.startswith(f"K25: not instrumenting: cannot use K25_RING_DIR={directory} (")
    assert line.endswith("; set it to a writable directory on a local tmpfs")


def test_a_directory_that_becomes_unusable_costs_the_rank_and_nothing_else(directory, stand_in):
    code = f"""
        {REGISTER}
        import shutil
        shutil.rmtree({str(directory)!r})
        open({str(directory)!r}, "w").close()
        {textwrap.indent(CONSTRUCT, " " * 8).strip()}
        print(worker.rank)
    """
    printed, logged = run(code, directory, PYTHONPATH=str(stand_in))
    assert printed == ["1"]
    (line,) = logged
    assert line.startswith(f"K25: rank not instrumented: no ring in K25_RING_DIR={directory} (")


BREAKAGES = {
    "a config of another shape": "del parallel.tensor_parallel_size",
    "no config at all": "config = None",
    "a ring that cannot be made": "import vllm_k25_instrument.ring as r; r._allocate = None",
    "an instrument that cannot be imported": "import sys; sys.modules['vllm_k25_instrument.worker'] = None",
    "hooks that cannot be put in place": "import vllm_k25_instrument.worker as w; w.WorkerInstrument.start = None",
    "a lost instance": f"import os; del os.environ['{INSTANCE_VARIABLE}']",
}


def test_whatever_breaks_in_us_the_worker_is_constructed(directory, stand_in):
    before, construct = CONSTRUCT.strip().rsplit("\n", 1)
    code = f"""
        import os, sys
        {REGISTER}
        {textwrap.indent(before, " " * 8).strip()}
        import vllm_k25_instrument.worker
        for name, breakage in {BREAKAGES!r}.items():
            if os.fork() == 0:
                print(name, file=sys.stderr)
                exec(breakage)
                {construct}
                print(name, worker.rank, flush=True)
                os._exit(0)
            os.wait()
    """
    printed, logged = run(code, directory, PYTHONPATH=str(stand_in))
    assert printed == [f"{name} 1" for name in BREAKAGES]
    for name in BREAKAGES:
        assert logged[logged.index(name) + 1] == "K25: rank not instrumented; vLLM goes on without us"


def test_an_exception_of_the_worker_s_own_constructor_is_its_own(directory, stand_in):
    code = f"""
        {REGISTER}
        from vllm.v1.worker.worker_base import WorkerBase
        try:
            WorkerBase()
        except TypeError as error:
            print("missing 3 required" in str(error))
    """
    assert run(code, directory, PYTHONPATH=str(stand_in)) == (["True"], [])


def test_a_vllm_without_the_class_is_logged_and_goes_on(directory, stand_in):
    (stand_in / "vllm" / "v1" / "worker" / "worker_base.py").write_text("something_else = 1\n")
    code = f"""
        {REGISTER}
        import vllm.v1.worker.worker_base as module
        print(module.something_else)
    """
    printed, logged = run(code, directory, PYTHONPATH=str(stand_in))
    assert printed == ["1"]
    assert logged[0] == "K25: cannot watch vLLM's workers; they are not instrumented"


def test_an_error_that_nobody_thought_of_is_logged_and_goes_on(directory):
    code = """
        import vllm_k25_instrument.plugin as plugin
        def break_down(settings):
            raise RuntimeError("unheard of")
        plugin._ensure_instance = break_down
        plugin.register()
        print("goes on")
    """
    printed, logged = run(code, directory)
    assert printed == ["goes on"]
    assert logged[0] == "K25: the instrument could not be started; vLLM goes on without it"
    assert logged[-1] == "RuntimeError: unheard of"


def test_unknown_variables_are_named_once_with_what_may_have_been_meant(directory):
    variables = {"K25_SAMPLE_EVRY": "4", "K25_XYZ": "1", "K25_DEMO_MODE": "1"}
    printed, logged = run(f"{REGISTER}; register()", directory, **variables)
    assert printed == []
    assert logged == [
        "K25: K25_SAMPLE_EVRY is not a setting and is ignored; did you mean K25_SAMPLE_EVERY?",
        "K25: K25_XYZ is not a setting and is ignored",
    ]


# --- environment and children --------------------------------------------------------------------------------


RAY = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "K25_"),
        ("", "K25_"),
        ("MY_", "MY_,K25_"),
        ("MY_, OUR_,", "MY_,OUR_,K25_"),
        ("K25_", "K25_"),
        ("A_, K25_ ,B_", "A_, K25_ ,B_"),
    ],
)
def test_ray_hands_our_variables_to_its_workers_and_keeps_the_users(directory, before, after):
    code = f"""
        import os
        {REGISTER}
        register()
        print(os.environ["{RAY}"])
    """
    assert run(code, directory, **{RAY: before})[0] == [after]


SPAWN = """
import multiprocessing, os, sys
from vllm_k25_instrument.plugin import register, _is_front_end

def child(name):
    register()
    print(name, os.environ.get("K25_INSTANCE"), os.environ.get("K25_INSTRUMENT"), _is_front_end(), flush=True)

if __name__ == "__main__":
    register()
    print("main", os.environ.get("K25_INSTANCE"), os.environ.get("K25_INSTRUMENT"), _is_front_end(), flush=True)
    for name in ("EngineCore_0", "ApiServer_1"):
        process = multiprocessing.get_context("spawn").Process(target=child, args=(name,), name=name)
        process.start()
        process.join()
        assert process.exitcode == 0
"""


def run_servers(tmp_path, directory, **environment):
    script = tmp_path / "server.py"
    script.write_text(SPAWN)
    # A script, as spawned children must be able to import their parent's main module.
    code = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, {str(script)!r}]).returncode)"
    printed, logged = run(code, directory, **environment)
    return [line.split() for line in printed], logged


def test_children_belong_to_their_parent_s_instance(tmp_path, directory):
    (main, engine, api), logged = run_servers(tmp_path, directory)
    assert logged == []
    assert main[1] == engine[1] == api[1] != "None"
    assert [main[3], engine[3], api[3]] == ["True", "False", "True"]
    assert [instance.name for instance in list_instances(directory)] == [main[1]]


def test_what_is_wrong_is_said_once_and_not_by_every_child(tmp_path):
    (tmp_path / "file").touch()
    lines, logged = run_servers(tmp_path, tmp_path / "file", K25_SAMPLE_EVRY="1")
    assert [line[1:3] for line in lines] == [["None", "0"]] * 3
    assert len(logged) == 2
    assert "did you mean K25_SAMPLE_EVERY" in logged[0]
    assert "cannot use K25_RING_DIR" in logged[1]


def test_a_server_started_from_inside_another_one_s_environment_has_its_own_instance(directory):
    code = f"""
        import os
        {REGISTER}
        print(os.environ["{INSTANCE_VARIABLE}"])
    """
    stale = "20250101T000000-1"
    printed, logged = run(code, directory, **{INSTANCE_VARIABLE: stale})
    assert printed != [stale]
    assert logged == []
    assert [instance.name for instance in list_instances(directory)] == printed


def test_a_ray_worker_belongs_to_the_instance_it_was_handed(directory, stand_in):
    given = "20250101T000000-1"
    code = f"""
        import os
        {REGISTER}
        {textwrap.indent(CONSTRUCT, " " * 8).strip()}
        print(os.environ["{INSTANCE_VARIABLE}"])
    """
    variables = {INSTANCE_VARIABLE: given, "RAY_JOB_ID": "01", "PYTHONPATH": str(stand_in)}
    assert run(code, directory, **variables)[0] == [given]
    (instance,) = list_instances(directory)
    assert instance.name == given
    assert len(open_rings(instance.path)[0]) == 1


def test_ray_workers_clear_up_on_machines_where_no_front_end_does(directory, stand_in):
    for n in range(4):
        kill(make_ring(directory / f"20250101T00000{n}-1"))
    directory.chmod(0o700)
    variables = {INSTANCE_VARIABLE: "20250102T000000-1", "RAY_JOB_ID": "01", "PYTHONPATH": str(stand_in)}
    run(f"{REGISTER}\n{CONSTRUCT}", directory, **variables, K25_RING_KEEP="1")
    assert {instance.name for instance in list_instances(directory)} == {"20250101T000003-1", "20250102T000000-1"}


def test_an_instance_s_name_cannot_lead_out_of_the_directory(directory, stand_in):
    variables = {INSTANCE_VARIABLE: "../elsewhere", "RAY_JOB_ID": "01", "PYTHONPATH": str(stand_in)}
    _, logged = run(f"{REGISTER}\n{CONSTRUCT}", directory, **variables)
    assert "must be the name of a folder" in logged[0]


# --- what a worker imports -----------------------------------------------------------------------------------


def test_a_worker_imports_nothing_that_only_the_tools_need():
    code = """
        import json, sys
        import torch, nvtx, wrapt, pydantic_settings  # what these bring along is theirs
        before = set(sys.modules)
        import vllm_k25_instrument.worker, vllm_k25_instrument.plugin
        new = sorted(set(sys.modules) - before)
        print(json.dumps(new))
    """
    (line,), _ = run(code)
    imported = json.loads(line)
    forbidden = ("export", "report", "analysis", "bench", "campaign", "commands", "cli", "demo")
    ours = [name.split(".")[1] for name in imported if name.startswith("vllm_k25_instrument.")]
    assert not set(ours) & set(forbidden)
    assert not {name.split(".")[0] for name in imported} & {*NOT_FOR_WORKERS, "vllm"}


def test_this_process_was_left_alone():
    assert "K25_INSTANCE" not in os.environ
