"""vLLM takes the arguments that the deployments give to `vllm serve`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.deploy.deployments import serve_commands

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps({
    name: {key: getattr(taken, key) for key in ("model_tag", "host", "port", "tensor_parallel_size", "nnodes",
                                                 "pipeline_parallel_size", "node_rank", "headless")}
    for name, arguments in json.load(sys.stdin).items()
    for taken in [parser.parse_args(arguments)]
}))
"""


@pytest.fixture(scope="module")
def taken():
    """What vLLM's own parser makes of each command. In a process of its own: it imports half of vLLM."""
    pytest.importorskip("vllm")
    result = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(serve_commands()),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.contract
@pytest.mark.parametrize("name", serve_commands())
def test_vllm_knows_every_argument(name, taken):
    assert taken[name]["model_tag"] in ("moonshotai/Kimi-K2.5", "/models/tiny-kimi-k2.5")


@pytest.mark.contract
def test_servers_in_containers_listen_to_their_network_and_the_one_of_systemd_does_not(taken):
    hosts = {name: arguments["host"] for name, arguments in taken.items() if not arguments["headless"]}
    assert hosts.pop("systemd") == "127.0.0.1"
    assert set(hosts.values()) == {"0.0.0.0"}


@pytest.mark.contract
def test_the_nodes_of_a_group_agree_on_its_shape(taken):
    leader, worker = taken["overlays/multi-node leader"], taken["overlays/multi-node worker"]
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "nnodes"):
        assert leader[key] == worker[key]
    assert leader["tensor_parallel_size"] == 8
    assert (leader["nnodes"], leader["headless"], worker["headless"]) == (2, False, True)
