"""The measurements on a GPU, where there is one; and, everywhere, their logic over the simulated GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.gpu import measure, rules  # noqa: E402
from tests.gpu.catalogue import CHECKS, SCHEMA  # noqa: E402
from tests.gpu.device import DriverError, GraphNodes, read_nodes  # noqa: E402
from tests.sim import SimulatedGpu  # noqa: E402
from tests.sim.torch_cuda import install  # noqa: E402

HERE = Path(__file__).parent


@pytest.mark.gpu
@pytest.mark.skipif(measure.why_not() != "", reason="needs a CUDA GPU")
def test_everything_that_can_be_measured_on_this_gpu_passes(tmp_path):
    out = tmp_path / "measured.json"
    run = subprocess.run(
        [str(HERE / "run.sh"), str(out)], env={**os.environ, "PYTHON": sys.executable}, timeout=260, check=False
    )
    checks = json.loads(out.read_text())["checks"]
    assert {name: check["reason"] for name, check in checks.items() if check["status"] == "failed"} == {}
    assert run.returncode == 0


@pytest.mark.skipif(measure.why_not() == "", reason="has a CUDA GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    out = tmp_path / "measured.json"
    run = subprocess.run(
        [str(HERE / "run.sh"), str(out)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (2, "needs a CUDA GPU\n")
    assert not out.exists()


# --- the same code over the simulated GPU -----------------------------------------------------------------


class SimulatedDevice:
    """What `device.CudaGpu` is on a GPU."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu

    def spin(self, us: float) -> None:
        self.gpu.launch(f"spin {us}", int(us * 1000))

    def multiply(self, a: Any, b: Any, out: Any) -> None:
        self.gpu.launch("multiply", len(a) * 10, run=lambda: torch.matmul(a, b, out=out))

    def increment(self, x: Any) -> None:
        self.gpu.launch("increment", 1500)

    def matrix(self, n: int) -> Any:
        return torch.randn(min(n, 8), min(n, 8))

    def nodes(self, graph: Any) -> GraphNodes:
        return GraphNodes(
            tuple((node.kind, node.work.name if node.work else "") for node in graph.nodes),
            frozenset((before, node.index) for node in graph.nodes for before in node.after),
        )

    def environment(self) -> dict[str, str]:
        return {"gpu": "Simulated GPU"}


@pytest.fixture(params=["launch", "node"])
def device(request, monkeypatch) -> SimulatedDevice:
    return SimulatedDevice(install(monkeypatch, events_pending_from=request.param, event_ns=1000, node_bytes=64))


IN_PROCESS = [check.name for check in CHECKS if check.name not in ("nvtx_log", "simulator_rules")]


def test_every_check_of_the_catalogue_has_its_function():
    assert list(measure.FUNCTIONS) == [check.name for check in CHECKS]


def test_on_a_device_that_keeps_the_rules_every_check_passes(device):
    result = measure.measure(device, IN_PROCESS)
    assert {name: (check["status"], check["reason"]) for name, check in result["checks"].items()} == dict.fromkeys(
        IN_PROCESS, ("passed", "")
    )
    assert result["schema"] == SCHEMA
    for check in CHECKS:
        if check.name in IN_PROCESS:
            assert set(check.shows) <= set(result["checks"][check.name]["figures"]), check.name
    cost = result["checks"]["event_node_cost"]["figures"]
    assert cost["ns_per_event_node"] == 1000
    assert cost["bytes_per_event_node"] == 64
    assert result["checks"]["double_queued"]["figures"]["events_pending_from"] == device.gpu.events_pending_from
    assert measure.default_name(result).startswith("simulated-gpu-")
    assert device.gpu.refusals == []
    json.dumps(result)


def test_the_simulated_gpu_agrees_with_its_own_rules_as_the_probes_put_them(device):
    probes = rules.run_probes(device)
    assert {name: probe["observed"] for name, probe in probes.items() if not probe["agrees"]} == {}
    assert measure.outcome_of_probes(probes).passed


def test_a_device_that_breaks_a_rule_is_told_of(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    probes = rules.run_probes(device)
    outcome = measure.outcome_of_probes(probes)
    assert not outcome.passed
    assert "synchronize_the_device: nothing refused" in outcome.reason


def test_a_graph_that_is_not_the_one_captured_without_us_fails_its_check(device, monkeypatch):
    read = device.nodes
    counts = iter([1, 2, 3, 4])
    monkeypatch.setattr(
        device, "nodes", lambda graph: GraphNodes((("kernel", str(next(counts))), *read(graph).labels), frozenset())
    )
    check = measure.run_check("own_graph_unchanged", device)
    assert check["status"] == "failed"
    assert "the own graph differs from the one captured without us" in check["reason"]


def test_what_is_missing_is_not_available_and_what_breaks_has_failed(device, monkeypatch):
    monkeypatch.setitem(sys.modules, "tests.gpu.package", None)
    assert measure.run_check("package_steps", device)["status"] == "not available"
    monkeypatch.setitem(measure.FUNCTIONS, "double_queued", lambda gpu: 1 / 0)
    check = measure.run_check("double_queued", device)
    assert (check["status"], check["reason"]) == ("failed", "ZeroDivisionError: division by zero")


def test_what_there_is_no_time_for_is_said(device, monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", -1.0)
    check = measure.measure(device, ["double_queued"])["checks"]["double_queued"]
    assert (check["status"], check["reason"]) == ("not available", "no time left")


def test_an_nvtx_tool_sees_our_ranges_without_any_gpu():
    from tests.gpu.nvtx_log import NotAvailableError, check

    try:
        passed, figures, whose = check()
    except NotAvailableError as error:
        pytest.skip(str(error))
    assert passed
    assert figures["ranges_logged"] >= 2
    assert whose == "of the package"


KINDS = {0x10: 0, 0x20: 7, 0x30: 0}
EDGES = ((0x10, 0x20), (0x20, 0x30))


class FakeDriver:
    """The calls of the CUDA driver that a graph is read with, on two kernels and an event node in a row."""

    def cuGraphGetNodes(self, graph, nodes, count):  # noqa: N802
        if nodes is not None:
            nodes[:] = list(KINDS)
        count._obj.value = len(KINDS)
        return 0

    def cuGraphNodeGetType(self, node, kind):  # noqa: N802
        kind._obj.value = KINDS[node.value]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, params):  # noqa: N802
        params._obj.func, params._obj.grid_x, params._obj.block_x = node.value, 132, 256
        return 0

    def cuFuncGetName(self, name, function):  # noqa: N802
        name._obj.value = f"kernel_{function.value:x}".encode()
        return 0

    def _edges(self, tails, heads, count):
        if tails is not None:
            tails[:], heads[:] = map(list, zip(*EDGES, strict=True))
        count._obj.value = len(EDGES)
        return 0


class Driver123(FakeDriver):
    def cuGraphGetEdges_v2(self, graph, tails, heads, data, count):  # noqa: N802
        assert data is None or len(data) == 8 * len(EDGES)
        return self._edges(tails, heads, count)


class Driver120(FakeDriver):
    def cuGraphGetEdges(self, graph, tails, heads, count):  # noqa: N802
        return self._edges(tails, heads, count)


@pytest.mark.parametrize("driver", [Driver123, Driver120])
def test_nodes_and_edges_are_read_from_the_driver(monkeypatch, driver):
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver())
    nodes = read_nodes(0xABC)
    assert [label[:3] for label in nodes.labels] == [
        ("kernel", "kernel_10", "(132, 0, 0, 256, 0, 0)"),
        ("event_record",),
        ("kernel", "kernel_30", "(132, 0, 0, 256, 0, 0)"),
    ]
    assert nodes.edges == {(0, 1), (1, 2)}
    assert (nodes.count("event_record"), len(nodes.without("event_record"))) == (1, 2)


def test_a_refusal_of_the_driver_is_an_error(monkeypatch):
    monkeypatch.setattr(Driver123, "cuGraphNodeGetType", lambda self, node, kind: 400)
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver123())
    with pytest.raises(DriverError, match="cuGraphNodeGetType returned 400"):
        read_nodes(0xABC)
