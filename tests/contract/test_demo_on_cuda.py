"""The demo's model and command line against what the installed vLLM's CUDA paths ask of them. No GPU is needed."""

from __future__ import annotations

import ast
import importlib.util
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.contract.test_twins import FullServer, instrumented  # noqa: E402
from tests.sim import SimulatedGpu  # noqa: E402
from vllm_k25_instrument.demo import tiny_model  # noqa: E402
from vllm_k25_instrument.demo.build import CUDA_SAMPLE_EVERY, MAX_WORKERS, Build  # noqa: E402
from vllm_k25_instrument.demo.server import VllmServer  # noqa: E402
from vllm_k25_instrument.demo.tiny_model import TinyShape  # noqa: E402
from vllm_k25_instrument.model import LostReason  # noqa: E402

pytestmark = pytest.mark.contract

WORKERS = range(1, MAX_WORKERS + 1)
SHAPE = TinyShape()


@pytest.mark.parametrize("workers", WORKERS)
def test_marlin_takes_the_experts_without_padding_them(monkeypatch, workers):
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    monkeypatch.setattr(marlin_utils.current_platform, "is_rocm", lambda: False)
    sizes = SimpleNamespace(
        hidden_dim=SHAPE.hidden,
        intermediate_size_per_partition_unpadded=SHAPE.expert_intermediate // workers,
    )
    assert marlin_utils.check_moe_marlin_supports_config(sizes, SHAPE.group_size, allow_tile_padding=False)


def function_of(module: str, name: str) -> Any:
    """A function of plain arithmetic out of a module whose imports need a GPU's libraries."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    names: dict[str, Any] = {}
    exec(compile(ast.Module([found], []), spec.origin, "exec"), names)
    return names[name]


@pytest.mark.parametrize("workers", WORKERS)
def test_flashinfers_mla_takes_the_number_of_heads_of_a_rank(workers):
    supports = function_of("vllm.v1.attention.backends.mla.flashinfer_mla", "_trtllm_gen_mla_decode_supports_num_heads")
    assert SHAPE.heads % workers == 0
    assert supports(SHAPE.heads // workers)


def test_the_head_sizes_are_those_that_mla_backends_are_written_for():
    """FlashAttention's MLA takes a latent head of 576 only, FlashInfer's a ``nope`` part of 64, 128 or 192."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend

    latent = tiny_model._KV_LORA + tiny_model._ROPE
    assert latent == 576
    assert latent in MLACommonBackend.get_supported_head_sizes()
    assert (tiny_model._NOPE, tiny_model._ROPE, tiny_model._V_HEAD) == (128, 64, 128)


def test_a_token_is_a_multiple_of_what_the_custom_all_reduces_can_move():
    """`CustomAllreduce.should_custom_ar`: a multiple of 16 bytes."""
    assert SHAPE.hidden * torch.bfloat16.itemsize % 16 == 0


@pytest.mark.parametrize("workers", WORKERS)
def test_vllm_knows_every_option_of_the_command_line(tmp_path, workers):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    server = VllmServer("m", log=tmp_path / "log", tensor_parallel_size=workers, build=Build.CUDA, eager=False)
    command = server.command
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(command[command.index("serve") + 1 :])
    assert arguments.tensor_parallel_size == workers
    assert arguments.gpu_memory_utilization == 0.1
    assert arguments.kv_cache_memory_bytes == 512 * 1024 * 1024
    assert arguments.enforce_eager is False


def unread(gpu: SimulatedGpu, sample_every: int) -> tuple[int, int]:
    """Samples read and lost as unread, of 60 steps of one graph with two in flight, as async scheduling has."""
    with instrumented(gpu, sample_every=sample_every) as made:
        server = FullServer(made, (8,), random.Random(4))
        server.capture()
        for _ in range(60):
            server.step(server.descs[0], depth=2)
        server.settle()
        return len(made.samples()), made.lost().get(LostReason.UNREAD, 0)


def test_with_two_steps_in_flight_the_demos_sampling_reads_every_twin_and_sampling_all_steps_would_not(gpu):
    assert unread(gpu, CUDA_SAMPLE_EVERY) == (20, 0)
    _, lost = unread(gpu, 1)
    assert lost > 10
