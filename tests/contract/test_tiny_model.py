"""The tiny checkpoint and the set-up that lets vLLM's CPU build run it, against the installed vLLM."""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_k25_instrument.demo.server import CPU_SETUP_PATH  # noqa: E402
from vllm_k25_instrument.demo.tiny_model import TinyShape, pack_int4, write_tiny_k25  # noqa: E402

pytestmark = pytest.mark.contract

ARCHITECTURES = {"text": "DeepseekV3ForCausalLM", "k25": "KimiK25ForConditionalGeneration"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {arch: write_tiny_k25(folder / arch, arch) for arch in ARCHITECTURES}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def run_python(code: str, *, cpu_setup: bool = True, **environment: str) -> str:
    """Standard output of `code` in a process of its own, into which vLLM's plugins have been loaded."""
    path = {"PYTHONPATH": str(CPU_SETUP_PATH)} if cpu_setup else {}
    preamble = "from vllm.plugins import load_general_plugins\nload_general_plugins()\n"
    result = subprocess.run(
        [sys.executable, "-c", preamble + textwrap.dedent(code)],
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1", **path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip().splitlines()[-1]


# --- the checkpoint ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_same_arguments_give_the_same_bytes_and_another_seed_gives_other_weights(tmp_path, checkpoints, arch):
    assert digests(write_tiny_k25(tmp_path / "again", arch)) == digests(checkpoints[arch])
    other = digests(write_tiny_k25(tmp_path / "other", arch, seed=1))
    assert other["model.safetensors"] != digests(checkpoints[arch])["model.safetensors"]


def test_a_checkpoint_that_is_there_is_not_written_again_but_one_of_other_arguments_is_replaced(tmp_path):
    out = write_tiny_k25(tmp_path, "text")
    before = (out / "model.safetensors").stat().st_mtime_ns
    write_tiny_k25(out, "text")
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    write_tiny_k25(out, "text", layers=2)
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2


def test_an_interrupted_write_is_not_taken_for_a_checkpoint(tmp_path):
    whole = digests(write_tiny_k25(tmp_path, "text", layers=2))
    (tmp_path / "tiny_k25.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"half")
    assert digests(write_tiny_k25(tmp_path, "text", layers=2)) == whole


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_vllm_knows_the_architecture_and_transformers_reads_the_tokenizer(checkpoints, arch):
    from transformers import AutoTokenizer
    from vllm import ModelRegistry

    (architecture,) = json.loads((checkpoints[arch] / "config.json").read_text())["architectures"]
    assert architecture == ARCHITECTURES[arch]
    assert architecture in ModelRegistry.get_supported_archs()
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[arch])
    assert tokenizer.decode(tokenizer("a decode step, µs")["input_ids"]) == "a decode step, µs"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_user|>user<|im_middle|>hi<|im_end|>"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_routed_experts_are_int4_in_groups_of_32_and_the_first_layer_is_dense(checkpoints, arch):
    from safetensors.torch import load_file

    weights = load_file(checkpoints[arch] / "model.safetensors")
    prefix = "language_model." if arch == "k25" else ""
    packed = weights[f"{prefix}model.layers.1.mlp.experts.0.down_proj.weight_packed"]
    scale = weights[f"{prefix}model.layers.1.mlp.experts.0.down_proj.weight_scale"]
    assert (packed.dtype, packed.shape, scale.shape) == (torch.int32, (256, 256 // 8), (256, 256 // 32))
    experts = {name.split(".mlp.")[0][-1] for name in weights if ".experts." in name}
    assert experts == {"1", "2", "3"}
    assert any(name.startswith("vision_tower.") for name in weights) is (arch == "k25")


def test_packed_int4_is_what_compressed_tensors_unpacks():
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    values = torch.randint(-8, 8, (16, 64), generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_from_int32(pack_int4(values), 4, values.shape).long(), values)


def test_sizes_that_make_no_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="layers=1"):
        write_tiny_k25(tmp_path, "text", layers=1)
    with pytest.raises(ValueError, match="hidden=100"):
        TinyShape(hidden=100)
    with pytest.raises(ValueError, match="allowed are 'text' and 'k25'"):
        write_tiny_k25(tmp_path, "k26")


# --- the set-up ------------------------------------------------------------------------------------------

ASK_FOR_INT4 = """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt4 as experts
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8StaticTensorSym, kInt4Static, kInt4Static32, kInt8DynamicTokenSym)
    print([
        experts._supports_quant_scheme(kInt4Static32, None),
        experts._supports_quant_scheme(kInt4Static, None),
        experts._supports_routing_method(RoutingMethodType.DeepSeekV3, kInt4Static32, None),
        experts._supports_quant_scheme(kInt4Static32, kInt8DynamicTokenSym),
        experts._supports_quant_scheme(kFp8StaticTensorSym, None),
    ])
"""


def test_with_the_setup_int4_in_groups_of_32_is_served_and_nothing_else_is_let_in():
    assert run_python(ASK_FOR_INT4) == "[True, True, True, False, False]"


def test_without_it_vllm_refuses_as_shipped():
    assert run_python(ASK_FOR_INT4, cpu_setup=False) == "[False, True, False, False, False]"


def test_no_server_of_a_user_can_find_it():
    names = {entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert "vllm_k25_instrument" in names
    assert "k25_demo_cpu_setup" not in names


def test_it_imports_nothing_of_vllm_before_vllm_does():
    code = """
        import sys
        print([m for m in sys.modules if "fused_moe" in m or "cpu_communicator" in m])
    """
    assert run_python(code, K25_DEMO_OPAQUE_OPS="1") == "[]"


def test_opaque_operators_are_used_only_where_they_are_asked_for():
    code = """
        from vllm.platforms.cpu import CpuPlatform
        import vllm.model_executor.layers.fused_moe.runner.moe_runner as module
        import torch
        runner = module.MoERunner.__new__(module.MoERunner)
        object.__setattr__(runner, "_shared_experts", object())
        forward = runner._select_forward()
        print(CpuPlatform.use_custom_op_collectives(), forward is torch.ops.vllm.moe_forward_shared)
    """
    assert run_python(code, K25_DEMO_OPAQUE_OPS="1") == "True True"
    assert run_python(code) == "False False"


def test_an_opaque_all_reduce_leaves_its_input_alone():
    code = """
        import torch
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
        class Doubling:
            def all_reduce(self, tensor, group):
                tensor *= 2
        communicator = CpuCommunicator.__new__(CpuCommunicator)
        communicator.dist_module, communicator.device_group = Doubling(), None
        x = torch.ones(2)
        print(communicator.all_reduce(x).tolist(), communicator.all_reduce(input_=x).tolist(), x.tolist())
    """
    assert run_python(code, K25_DEMO_OPAQUE_OPS="1") == "[2.0, 2.0] [2.0, 2.0] [1.0, 1.0]"


EXPERTS = """
    import torch, k25_demo_cpu_setup as setup
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm._custom_ops import CPUQuantMethod, fused_experts_cpu
    from vllm_k25_instrument.demo.tiny_model import pack_int4

    g = torch.Generator().manual_seed(0)
    E, K, I, GROUP, M = 4, 256, 128, 32, 8

    def experts(out_features, in_features):
        q = torch.randint(-8, 8, (E, out_features, in_features), generator=g)
        scale = torch.rand(E, out_features, in_features // GROUP, generator=g) * in_features ** -0.5 / 4
        packed = torch.stack([pack_int4(each) for each in q])
        exact = q * scale.to(torch.bfloat16).float().repeat_interleave(GROUP, -1)
        return packed.transpose(1, 2).contiguous(), scale.to(torch.bfloat16).transpose(1, 2).contiguous(), exact

    w13, s13, exact13 = experts(2 * I, K)
    w2, s2, exact2 = experts(K, I)
    x = torch.randn(M, K, generator=g).to(torch.bfloat16)
    weights = torch.rand(M, 2, generator=g)
    ids = torch.stack([torch.randperm(E, generator=g)[:2] for _ in range(M)]).to(torch.int32)
    d13, d2 = setup.dequantize_int4(w13, s13), setup.dequantize_int4(w2, s2)
    in_torch = setup.experts_in_torch(x, d13, d2, weights, ids).float()

    expected = torch.zeros(M, K)
    for token in range(M):
        for chosen in range(2):
            e = int(ids[token, chosen])
            gate, up = (exact13[e] @ x[token].float()).chunk(2)
            expected[token] += weights[token, chosen] * (exact2[e] @ (torch.nn.functional.silu(gate) * up))

    def likeness(a, b):
        return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])
"""


def test_where_the_int4_kernel_is_missing_the_experts_in_torch_compute_the_same():
    likeness = float(run_python(EXPERTS + "    print(likeness(in_torch, expected))"))
    assert likeness > 0.999


def test_the_int4_kernel_computes_what_vllm_says_it_does_not_support():
    code = """
    if setup._has_int4_kernel():
        b13, b2, bs13, bs2, bz13, bz2 = cpu_moe.prepare_int4_moe_layer_for_cpu(w13, w2, s13, s2)
        out = torch.empty_like(x)
        fused_experts_cpu(out, x, b13, b2, weights, ids, CPUQuantMethod.INT4_W4A8, bs13, bs2, bz13, bz2, None)
        print(likeness(out.float(), expected))
    else:
        print("missing")
"""
    answer = run_python(EXPERTS + code)
    if answer == "missing":
        pytest.skip("this processor has no AVX-512 BF16, for which alone the kernel is built")
    assert float(answer) > 0.99


def test_the_experts_in_torch_take_the_kernels_place_through_vllms_own_calls():
    code = """
    setup._has_int4_kernel = lambda: False
    import importlib, sys
    sys.modules.pop(cpu_moe.__name__)
    module = importlib.import_module(cpu_moe.__name__)
    setup._allow_int4_experts(module)
    w1, w2_, s1, s2_, z1, z2 = module.prepare_int4_moe_layer_for_cpu(w13, w2, s13, s2)
    out = torch.empty_like(x)
    layer = module.CPUExpertsInt4.__new__(module.CPUExpertsInt4)
    layer.apply(output=out, hidden_states=x, w1=w1, w2=w2_, topk_weights=weights, topk_ids=ids)
    print(torch.equal(out.float(), in_torch))
"""
    assert run_python(EXPERTS + code) == "True"
