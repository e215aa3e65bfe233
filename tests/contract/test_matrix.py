"""The hook table against every vLLM that it is for: `make matrix` all of them, else the installed and the newest one.

The trees of releases that are not installed come from `python tools/fetch_vllm.py`; none of them is imported.
"""

from __future__ import annotations

import re

import pytest

from tests.contract import checks
from tests.contract.syntax import VllmTree
from tests.contract.trees import ROOT, WHOLE_MATRIX, releases, root_of, tree_of
from vllm_k25_instrument.hooks.arguments import argument, message_bytes
from vllm_k25_instrument.hooks.patcher import exists_in, version_matches
from vllm_k25_instrument.hooks.point import HookKind, HookPoint
from vllm_k25_instrument.hooks.releases import ABSENCES, MATRIX, NEWEST
from vllm_k25_instrument.hooks.resolve import target_exists, version_of
from vllm_k25_instrument.hooks.table import HOOK_TABLE, READ_VLLM
from vllm_k25_instrument.model import Category

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module", params=releases())
def release(request) -> str:
    if root_of(request.param) is None:
        reason = f"vLLM {request.param} is not cached: python tools/fetch_vllm.py {request.param}"
        if WHOLE_MATRIX:
            pytest.fail(reason)
        pytest.skip(reason)
    return request.param


@pytest.fixture
def tree(release) -> VllmTree:
    return tree_of(release)


@pytest.fixture(scope="module")
def newest() -> VllmTree:
    """The newest tree there is here, to change and see what the checks say."""
    there = [tree for tree in map(tree_of, reversed(releases())) if tree is not None]
    if not there:
        pytest.skip("no vLLM is installed or cached: python tools/fetch_vllm.py --newest")
    return there[0]


# --- each release --------------------------------------------------------------------------------------------


def test_the_tree_is_of_the_release(release):
    assert version_of(root_of(release)).partition("+")[0] == release
    assert version_matches(release, READ_VLLM)


def test_every_target_of_the_table_is_there_and_can_be_wrapped(release, tree):
    assert checks.missing_targets(tree, release, HOOK_TABLE) == []


def test_no_instance_hides_a_wrapped_method_behind_an_attribute(release, tree):
    assert checks.shadowed_targets(tree, release, HOOK_TABLE) == []


def test_what_doctor_and_the_table_of_compatibility_say_is_so(release):
    assert [p.id for p in checks.expected(HOOK_TABLE, release) if not target_exists(p, root_of(release))] == []


def test_what_the_table_says_is_of_other_versions_is_not_there(release, tree):
    assert checks.unexpected_targets(tree, release, HOOK_TABLE) == []


def test_every_category_and_hook_has_a_target_or_a_reason_why_not(release):
    assert checks.uncovered(release, HOOK_TABLE) == []


def test_the_arguments_that_hooks_read_are_where_they_look_for_them(release, tree):
    assert checks.misread_arguments(tree, release, HOOK_TABLE) == []
    assert checks.positional_flags(tree) == []


def test_vllm_calls_every_target_from_where_we_think(release, tree):
    assert checks.uncalled(tree, release, HOOK_TABLE) == []


def test_no_mla_backend_is_outside_of_the_families_that_are_hooked(release, tree):
    assert checks.outside_of_the_family(tree, release, HOOK_TABLE) == []


def test_what_hooks_read_of_vllms_objects_is_there(release, tree):
    assert checks.missing_attributes(tree, release) == []


def test_a_graph_dispatch_returns_what_is_read_of_it(release, tree):
    assert checks.unlike_dispatches(tree, release, HOOK_TABLE) == []


def test_the_experts_of_kimi_k2_5_are_in_the_hooked_family(release, tree):
    """The class of W4A16 experts had another name once: CompressedTensorsWNA16MarlinMoEMethod."""
    (apply,) = [p for p in HOOK_TABLE if p.target == "FusedMoEMethodBase.apply"]
    names = {cls.name for _, cls in tree.family(apply.module, "FusedMoEMethodBase")}
    assert "CompressedTensorsWNA16MoEMethod" in names
    if version_matches(release, "<0.24"):
        assert "CompressedTensorsWNA16MarlinMoEMethod" in names


# --- the releases themselves ---------------------------------------------------------------------------------


def test_the_matrix_is_of_releases_whose_targets_are_said_to_be_known():
    assert all(version_matches(release, READ_VLLM) for release in MATRIX)
    assert not version_matches(NEWEST.replace(NEWEST.split(".")[1], str(int(NEWEST.split(".")[1]) + 1)), READ_VLLM)


def test_a_reason_is_of_something_that_the_table_has():
    known = {p.name for p in HOOK_TABLE} | {p.id for p in HOOK_TABLE} | {str(p.category) for p in HOOK_TABLE}
    assert {absence.what for absence in ABSENCES} <= known
    for absence in ABSENCES:
        assert absence.reason
        assert any(version_matches(release, absence.versions) for release in MATRIX), absence


# --- the checks notice ---------------------------------------------------------------------------------------


def changed(tree: VllmTree, module: str, pattern: str, replacement: str) -> VllmTree:
    """The tree with a module's text changed."""
    text, changes = re.subn(pattern, replacement, tree.texts[module])
    assert changes, f"{pattern} is not in {module}"
    return tree.with_text(module, text)


def only(target: str) -> list[HookPoint]:
    return [point for point in HOOK_TABLE if point.target == target and exists_in(point, NEWEST)]


BACKEND = "vllm.v1.attention.backend"
TRITON = "vllm.v1.attention.backends.mla.triton_mla"
LAYER = "vllm.model_executor.layers.attention.mla_attention"
MOE_BASE = "vllm.model_executor.layers.fused_moe.fused_moe_method_base"


def test_a_renamed_method_is_noticed(newest):
    tree = changed(newest, BACKEND, r"def forward_mqa\(", "def forward_latent(")
    assert checks.missing_targets(tree, NEWEST, HOOK_TABLE) == [f"{BACKEND}:MLAAttentionImpl.forward_mqa is not there"]


def test_a_renamed_class_is_noticed(newest):
    tree = changed(newest, BACKEND, r"class MLAAttentionImpl\b", "class LatentAttentionImpl")
    missing = checks.missing_targets(tree, NEWEST, HOOK_TABLE)
    assert f"{BACKEND}:MLAAttentionImpl.forward_mqa is not there" in missing
    assert checks.outside_of_the_family(tree, NEWEST, HOOK_TABLE)


def test_a_method_that_became_static_is_noticed(newest):
    tree = changed(newest, MOE_BASE, r"    def apply_monolithic\(", "    @staticmethod\n    def apply_monolithic(")
    assert any("is no plain function" in problem for problem in checks.missing_targets(tree, NEWEST, HOOK_TABLE))


def test_an_attribute_over_a_hooked_method_is_noticed(newest):
    body = r"(class TritonMLAImpl\b.*?def __init__\(.*?\n)(        super\(\))"
    tree = changed(newest, TRITON, "(?s)" + body, r"\1        self.forward_mqa = self.fast\n\2")
    (problem,) = checks.shadowed_targets(tree, NEWEST, HOOK_TABLE)
    assert problem.startswith(f"{TRITON}:TritonMLAImpl assigns self.forward_mqa")


def test_a_decorator_that_nobody_has_looked_at_is_noticed(newest):
    module = "vllm.v1.worker.gpu_model_runner"
    tree = changed(newest, module, r"    def _sample\(", "    @torch.compile\n    def _sample(")
    assert checks.missing_targets(tree, NEWEST, HOOK_TABLE) == [
        f"{module}:GPUModelRunner._sample is decorated by torch.compile, which nobody has looked at"
    ]


def test_arguments_of_one_backend_in_another_order_are_noticed(newest):
    swapped = r"\3: \4,\n        \1: \2,\n    ) ->"
    tree = changed(newest, TRITON, r"(attn_metadata): (\w+),\n\s*(layer): (\w+),\n\s*\) ->", swapped)
    assert checks.misread_arguments(tree, NEWEST, HOOK_TABLE) == [
        f"{TRITON}:TritonMLAImpl.forward_mqa: parameter 4 is attn_metadata, not layer"
    ]


def test_a_hook_that_looks_in_the_wrong_place_is_noticed(newest):
    wrong = HookPoint(
        "mla_decode",
        HookKind.RANGE,
        BACKEND,
        "MLAAttentionImpl.forward_mqa",
        category=Category.MLA_ATTENTION,
        subclasses=True,
        layer=lambda args, kwargs: argument(args, kwargs, 3, "layer"),
        nbytes=message_bytes,
    )
    problems = checks.misread_arguments(newest, NEWEST, [wrong])
    assert f"{TRITON}:TritonMLAImpl.forward_mqa: parameter 3 is attn_metadata, not layer" in problems


def test_what_a_hook_reads_is_found_by_running_it():
    (decode,) = only("MLAAttentionImpl.forward_mqa")
    assert checks.reads(decode) == [(4, ("layer",))]
    (all_reduce,) = only("DeviceCommunicatorBase.all_reduce")
    assert (1, ()) in checks.reads(all_reduce)
    (pynccl,) = only("PyNcclCommunicator.all_reduce")
    assert checks.reads(pynccl) == [(2, ("out_tensor",))]


def test_a_message_that_is_no_tensor_is_noticed(newest):
    module = "vllm.distributed.device_communicators.cuda_communicator"
    tree = changed(
        newest, module, r"def send\(self, tensor: torch\.Tensor", "def send(self, dst_: int, tensor: torch.Tensor"
    )
    assert checks.misread_arguments(tree, NEWEST, HOOK_TABLE) == [
        f"{module}:CudaCommunicator.send: parameter 1, dst_: int, is no tensor"
    ]


def test_a_target_that_nobody_calls_any_more_is_noticed(newest):
    tree = changed(newest, LAYER, r"self\.impl\.forward_mqa\(", "self.impl.forward_latent(")
    assert [problem.partition(":")[0] for problem in checks.uncalled(tree, NEWEST, HOOK_TABLE)] == [BACKEND]


def test_a_flag_handed_over_by_position_is_noticed(newest):
    module = "vllm.v1.worker.gpu_worker"
    tree = changed(
        newest, module, r"self\.model_runner\.execute_model\(", "self.model_runner.execute_model(0, 0, True, "
    )
    assert checks.positional_flags(tree)


def test_an_attribute_that_is_gone_is_noticed(newest):
    module = "vllm.compilation.cuda_graph"
    tree = changed(newest, module, r"concrete_cudagraph_entries", "graph_entries")
    assert checks.missing_attributes(tree, NEWEST) == [f"{module}:CUDAGraphWrapper has no concrete_cudagraph_entries"]


def test_a_target_that_the_table_wrongly_says_is_absent_is_noticed(newest):
    late = HookPoint("layer", HookKind.LAYER, LAYER, "MLAAttention.forward_impl", ">=99", layer=lambda args, kwargs: 0)
    assert checks.unexpected_targets(newest, NEWEST, [late]) == [f"{late.id} is there, and the table says >=99"]


def test_a_category_without_a_hook_or_a_reason_is_noticed():
    rest = [point for point in HOOK_TABLE if point.category is not Category.MLA_ATTENTION]
    assert "nothing of mla_attention is hooked, and no reason is given" in checks.uncovered(NEWEST, rest)
    modern = [p for p in HOOK_TABLE if p.name != "mla_decode" or p.target == "MLAAttentionImpl.forward_mqa"]
    assert checks.uncovered("0.15.1", modern) == ["nothing of mla_decode is hooked, and no reason is given"]


def test_another_dispatch_is_noticed(newest):
    module = "vllm.v1.worker.gpu.dp_utils"
    tree = changed(newest, module, r"tuple\[BatchExecutionDescriptor, ", "tuple[int, ")
    assert checks.unlike_dispatches(tree, NEWEST, HOOK_TABLE)


def test_the_tree_reader_follows_bases_imports_and_packages(tmp_path):
    files = {
        "__init__.py": "",
        "_version.py": "__version__ = version = '1.2.3+cpu'\n",
        "a/__init__.py": "from .base import Base as Root\n",
        "a/base.py": "class Base:\n    def f(self, x, layer): ...\n",
        "b.py": "from vllm.a import Root\nclass Mid(Root[int]):\n    pass\n",
        "c.py": "import vllm\nfrom vllm.b import Mid\nclass Leaf(Mid):\n    def f(self, layer, x): ...\n",
        "d.py": "class Mid: ...\nclass Stranger(Mid):\n    def f(self): ...\n",
    }
    for name, text in files.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tree = VllmTree(tmp_path / "vllm")
    assert {cls.name for _, cls in tree.family("vllm.a.base", "Base")} == {"Base", "Mid", "Leaf"}
    assert [d.where for d in tree.overrides("vllm.a", "Root.f")] == ["vllm.a.base:Base.f", "vllm.c:Leaf.f"]
    assert tree.find_function("vllm.b", "Mid.f").where == "vllm.a.base:Base.f"
    assert version_of(tmp_path / "vllm") == "1.2.3+cpu"


def test_the_matrix_has_a_target_in_the_makefile():
    assert "K25_MATRIX=1" in (ROOT / "Makefile").read_text()
