"""What the hook table claims of a vLLM tree, checked on its syntax. Each check answers with what is wrong, by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.contract.syntax import Definition, VllmTree
from vllm_k25_instrument.hooks.patcher import exists_in, version_matches
from vllm_k25_instrument.hooks.point import HookKind, HookPoint
from vllm_k25_instrument.hooks.releases import ABSENCES
from vllm_k25_instrument.model import HOOKED_CATEGORIES

# A decorator that leaves a plain function, which a wrapper can go around.
HARMLESS_DECORATORS = re.compile(
    r"abstractmethod|(torch\.)?inference_mode(\(\))?|torch\.no_grad\(\)|step_eplb_after\(.*\)|override|"
    r"instrument\(.*\)|record_function_or_nullcontext\(.*\)|torch\.compiler\.disable"
)

LEFT_ALONE = {
    "0.22": re.compile(r"vllm\.models\.deepseek_v4\..*:\w+\.forward_mqa"),  # class methods, called by that model alone
}
"""By minor release: definitions in a hooked family that are known to be otherwise; the patcher passes them by."""


def expected(points: Iterable[HookPoint], version: str) -> list[HookPoint]:
    """The points that the table says this release has."""
    return [point for point in points if exists_in(point, version)]


def definitions(tree: VllmTree, version: str, point: HookPoint) -> list[Definition]:
    """Every function that the patcher would wrap for a point."""
    if point.subclasses:
        left_alone = LEFT_ALONE.get(".".join(version.split(".")[:2]))
        found = tree.overrides(point.module, point.target)
        return [d for d in found if left_alone is None or not left_alone.fullmatch(d.where)]
    found = tree.find_function(point.module, point.target)
    return [found] if found else []


# --- targets -------------------------------------------------------------------------------------------------


def missing_targets(tree: VllmTree, version: str, points: Iterable[HookPoint]) -> list[str]:
    """Targets that the table says are there and are not, or not as something that can be wrapped."""
    problems = []
    for point in expected(points, version):
        found = tree.find_function(point.module, point.target)
        if found is None:
            problems.append(f"{point.id} is not there")
            continue
        owner = point.target.rpartition(".")[0]
        if owner and not point.subclasses and found.owner != owner:
            problems.append(f"{point.id} is inherited from {found.where}: the patcher wraps a class's own methods only")
        wrapped = [d for d in definitions(tree, version, point) if "abstractmethod" not in d.decorators]
        if not wrapped:
            problems.append(f"{point.id} is abstract, and nothing defines it")
        problems += [f"{definition.where} is no plain function" for definition in wrapped if not definition.is_plain]
        problems += [
            f"{definition.where} is decorated by {decorator}, which nobody has looked at"
            for definition in wrapped
            for decorator in definition.decorators
            if not HARMLESS_DECORATORS.fullmatch(decorator)
        ]
    return problems


# Shadowed, and what is put there is hooked itself.
HOOKED_ELSEWHERE = {"vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod"}


def shadowed_targets(tree: VllmTree, version: str, points: Iterable[HookPoint]) -> list[str]:
    """Hooked methods that a class hides behind an attribute of its instances: the wrapper is never called."""
    problems = []
    for point in expected(points, version):
        owner, _, name = point.target.rpartition(".")
        if not owner:
            continue
        for module, cls in tree.family(point.module, owner):
            if f"{module}:{cls.name}" in HOOKED_ELSEWHERE:
                continue
            for node in ast.walk(cls):
                stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name
                if stored and ast.unparse(node.value) == "self":
                    problems.append(f"{module}:{cls.name} assigns self.{name} (line {node.lineno})")
    return problems


def unexpected_targets(tree: VllmTree, version: str, points: Iterable[HookPoint]) -> list[str]:
    """Targets that the table says this release has not, and that are there without a reason being given."""
    excused = {absence.what for absence in ABSENCES if version_matches(version, absence.versions)}
    return [
        f"{point.id} is there, and the table says {point.versions}"
        for point in points
        if not exists_in(point, version)
        and point.id not in excused
        and tree.find_function(point.module, point.target) is not None
    ]


def uncovered(version: str, points: Iterable[HookPoint]) -> list[str]:
    """Categories and hooks without a target in this release, and without a reason; and reasons for what is there."""
    points = list(points)
    present = expected(points, version)
    covered = {str(point.category) for point in present if point.category} | {point.name for point in present}
    wanted = {str(category) for category in HOOKED_CATEGORIES} | {point.name for point in points}
    excused = {absence.what for absence in ABSENCES if version_matches(version, absence.versions)}
    problems = [f"nothing of {name} is hooked, and no reason is given" for name in sorted(wanted - covered - excused)]
    problems += [f"{name} is hooked, and listed as absent" for name in sorted(excused & covered)]
    return problems + [f"{point.id} is hooked, and listed as absent" for point in present if point.id in excused]


# --- arguments -----------------------------------------------------------------------------------------------


class _Anything:
    """What a hook's function is given for an argument: any attribute is there."""

    nbytes = 0
    layer_name = "model.layers.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Positional(tuple):
    """Arguments given by position; remembers which were looked at."""

    def __new__(cls) -> _Positional:
        self = super().__new__(cls, [_Anything() for _ in range(40)])
        self.read = set()
        return self

    def __getitem__(self, index):
        self.read.add(index)
        return super().__getitem__(index)


class _Named(Mapping):
    """Arguments given by keyword, none of which is there; remembers which were asked for."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.read.append(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        self.read.append(str(name))
        return False

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Reads(tuple):
    """One argument that a hook reads: (position or None, names it goes by; none where any name will do)."""

    __slots__ = ()

    def __new__(cls, position: int | None, *names: str) -> Reads:
        return super().__new__(cls, (position, names))


# What the wrappers themselves read, by kind and by target; the rest is found by running a point's functions.
READ_BY_KIND = {
    HookKind.STEP: [Reads(1, "scheduler_output")],
}
READ_BY_TARGET = {
    "CudaGraphManager.capture": [Reads(2, "progress_bar_desc")],
    "CudaGraphManager.run_fullgraph": [Reads(1, "desc")],
    "GPUModelRunner._capture_cudagraphs": [Reads(1, "batch_descriptors"), Reads(2, "cudagraph_runtime_mode")],
}


def reads(point: HookPoint) -> list[Reads]:
    """The arguments, ``self`` apart, that a hook reads: by position, and by which names where they are keywords."""
    found = [*READ_BY_KIND.get(point.kind, ()), *READ_BY_TARGET.get(point.target, ())]
    for function in (point.detail, point.nbytes, point.layer, point.path, point.shared_experts):
        if function is None:
            continue
        positional, named = _Positional(), _Named()
        try:
            function(positional, {})
            function((_Anything(),), named)
        except (KeyError, TypeError):
            if positional.read != {0}:  # what it reads of ``self`` alone is in ATTRIBUTES
                raise
        positions = sorted(index for index in positional.read if index > 0)
        if positions:
            found += [Reads(position, *named.read) for position in positions]
        elif named.read:
            found.append(Reads(None, *named.read))
    return found


def misread_arguments(tree: VllmTree, version: str, points: Iterable[HookPoint]) -> list[str]:
    """Arguments that are not where a hook looks for them, in any of the functions that it wraps."""
    problems = []
    for point in expected(points, version):
        for definition in definitions(tree, version, point):
            for position, names in reads(point):
                problem = _misread(definition, position, names)
                if problem:
                    problems.append(f"{definition.where}: {problem}")
    return problems


def _misread(definition: Definition, position: int | None, names: tuple[str, ...]) -> str:
    parameters = definition.parameters
    if position is None:
        return "" if set(names) & set(definition.keywords) else f"no parameter {' or '.join(names)}"
    if definition.node.args.vararg and len(parameters) <= position:
        return ""  # it passes on what it gets
    if len(parameters) <= position:
        return f"no parameter {position} ({' or '.join(names) or 'a tensor'})"
    if names:
        return (
            "" if parameters[position] in names else f"parameter {position} is {parameters[position]}, not {names[0]}"
        )
    annotation = definition.annotation(position)
    # A receiver knows the size only; some overrides leave the annotation to their parent.
    is_message = (
        "Tensor" in annotation or annotation == "torch.Size" or (parameters[position], annotation) == ("input_", "")
    )
    return "" if is_message else f"parameter {position}, {parameters[position]}: {annotation}, is no tensor"


def positional_flags(tree: VllmTree) -> list[str]:
    """Calls of execute_model that hand `dummy_run` over by position, where the step's wrapper does not see it."""
    problems = []
    for module in tree.modules(r"vllm\.v1\.worker\..*"):
        if "execute_model(" not in tree.texts[module]:
            continue
        parsed = tree.parsed(module)
        for node in ast.walk(parsed) if parsed else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("execute_model") and len(node.args) > 2:
                problems.append(f"{module}:{node.lineno}: {len(node.args)} arguments by position")
    return problems


# --- calls ---------------------------------------------------------------------------------------------------

_COMM = r"vllm\.distributed\.device_communicators"
_CUDA = rf"{_COMM}\.cuda_communicator"
_GROUP = r"vllm\.distributed\.parallel_state"
_V1 = r"vllm\.v1\.worker\.gpu_model_runner"
_V2 = r"vllm\.v1\.worker\.gpu\.model_runner"
_MOE = r"vllm\.model_executor\.layers\.fused_moe"
_MLA = r"vllm\.model_executor\.layers\.attention\.mla_attention"

CALLED = {
    "execute_model": (r"vllm\.v1\.worker\.gpu_worker", r"self\.model_runner\.execute_model"),
    "sample_tokens": (r"vllm\.v1\.worker\.gpu_worker", r"self\.model_runner\.sample_tokens"),
    "MessageQueue.dequeue": (r"vllm\.v1\.executor\.multiproc_executor", r"self\.rpc_broadcast_mq\.dequeue"),
    "_determine_batch_execution_and_padding": (_V1, r"self\._determine_batch_execution_and_padding"),
    "dispatch_cg_and_sync_dp": (_V2, "dispatch_cg_and_sync_dp"),
    "_update_states": (_V1, r"self\._update_states"),
    "_prepare_inputs": (_V1, r"self\._prepare_inputs"),
    "_build_attention_metadata": (_V1, r"self\._build_attention_metadata"),
    "_preprocess": (_V1, r"self\._preprocess"),
    "add_requests": (_V2, r"self\.add_requests"),
    "update_requests": (_V2, r"self\.update_requests"),
    "gather_batch_req_state": (_V2, r"self\.gather_batch_req_state"),
    "prepare_inputs": (_V2, r"self\.prepare_inputs"),
    "prepare_attn": (_V2, r"self\.prepare_attn"),
    "_sample": (_V1, r"self\._sample"),
    "sample": (_V2, r"self\.sample"),
    "propose_draft_token_ids": (_V1, r"self\.propose_draft_token_ids"),
    "BaseSpeculator.propose": (_V2, r"self\.speculator\.propose"),
    "DeviceCommunicatorBase.all_reduce": (_GROUP, r"self\.device_communicator\.all_reduce"),
    "PyNcclCommunicator.all_reduce": (_CUDA, r"pynccl_comm\.all_reduce"),
    "CustomAllreduce.custom_all_reduce": (_CUDA, r"ca_comm\.custom_all_reduce"),
    "SymmMemCommunicator.all_reduce": (_CUDA, r"symm_mem_comm\.all_reduce"),
    "quick_all_reduce": (_CUDA, r"qr_comm\.quick_all_reduce"),
    "FlashInferAllReduce.all_reduce": (_CUDA, r"fi_ar_comm\.all_reduce"),
    "FlashInferPcieIpcAllReduce.all_reduce": (_CUDA, r"fi_pcie_ipc_ar_comm\.all_reduce"),
    "AiterCustomAllreduce.custom_all_reduce": (_CUDA, r"(aiter_ar_comm|ca_comm)\.custom_all_reduce"),
    "all_gather": (_GROUP, r"self\.device_communicator\.all_gather"),
    "all_gatherv": (_GROUP, r"self\.device_communicator\.all_gatherv"),
    "reduce_scatter": (_GROUP, r"self\.device_communicator\.reduce_scatter"),
    "reduce_scatterv": (_GROUP, r"self\.device_communicator\.reduce_scatterv"),
    "reduce_scatterv_into_output": (_GROUP, r"self\.device_communicator\.reduce_scatterv_into_output"),
    "gather": (_GROUP, r"self\.device_communicator\.gather"),
    "broadcast": (
        r"vllm\.distributed\.(parallel_state|stateless_coordinator)",
        r"self\.device_communicator\.broadcast",
    ),
    "send": (_GROUP, r"self\.device_communicator\.send"),
    "recv": (_GROUP, r"self\.device_communicator\.recv"),
    "wait_for_comm": (r"vllm\.v1\.worker\.gpu_worker", r"object\.__getattribute__\(self, 'wait_for_comm'\)"),
    "dispatch": (_GROUP, r"self\.device_communicator\.dispatch"),
    "dispatch_router_logits": (_GROUP, r"self\.device_communicator\.dispatch_router_logits"),
    "combine": (_GROUP, r"self\.device_communicator\.combine"),
    "combine_into_output": (_GROUP, r"self\.device_communicator\.combine_into_output"),
    "_run_ar": (r"vllm\.v1\.worker\.dp_utils", "_run_ar"),
    "sync_cudagraph_and_dp_padding": (
        r"vllm\.v1\.worker\.gpu\.(dp_utils|model_runner)",
        "sync_cudagraph_and_dp_padding",
    ),
    "prepare_async": (rf"{_MOE}\.modular_kernel", r"self\.prepare_finalize\.prepare_async"),
    "finalize_async": (rf"{_MOE}\.modular_kernel", r"self\.prepare_finalize\.finalize_async"),
    "MoERunner._forward_impl": (rf"{_MOE}\.runner\.moe_runner", r".*\._forward_impl"),
    "DefaultMoERunner.forward_impl": (
        rf"{_MOE}\.runner\.default_moe_runner",
        r"(layer\.)?runner\.forward_impl|self\.forward_impl",
    ),
    "FusedMoE.forward_impl": (rf"{_MOE}\.layer", r"self\.forward_impl"),
    "apply": (rf"{_MOE}\.(layer|routed_experts|runner\.\w+)", r"self\._?quant_method\.apply"),
    "apply_monolithic": (
        rf"{_MOE}\.(layer|routed_experts|runner\.\w+)",
        r"self\._?quant_method\.apply_monolithic",
    ),
    "forward_monolithic_cuda": (rf"{_MOE}\.unquantized_fused_moe_method", r"self\._select_monolithic"),
    "forward_monolithic_cpu": (rf"{_MOE}\.unquantized_fused_moe_method", r"self\._select_monolithic"),
    "select_experts": (rf"{_MOE}\.(layer|runner\.\w+)", r"self\.router\.select_experts"),
    "SharedExperts.__init__": (rf"{_MOE}\.runner\.moe_runner", "SharedExperts"),
    "FusedMoE.__init__": (r"vllm\.model_executor\.models\.deepseek_v2", "SharedFusedMoE"),
    "SharedFusedMoE.__init__": (r"vllm\.model_executor\.models\.deepseek_v2", "SharedFusedMoE"),
    "MLAAttention.forward_impl": (_MLA, r"self\.forward_impl"),
    "forward_mqa": (_MLA, r"self\.impl\.forward_mqa"),
    "forward_mha": (_MLA, r"self\.impl\.forward_mha"),
    "MLACommonImpl.forward": (r"vllm\.attention\.layer", r"self\.impl\.forward"),
    "_forward_decode": (_MLA, r"self\._forward_decode"),
    "_forward_prefill": (_MLA, r"self\._forward_prefill"),
    "AttentionImpl.forward": (
        r"vllm\.(attention\.layer|model_executor\.layers\.attention\.attention)",
        r"self\.impl\.forward",
    ),
    "CudaGraphManager.capture": (_V2, r"self\.cudagraph_manager\.capture"),
    "_capture_cudagraphs": (_V1, r"self\._capture_cudagraphs"),
    "run_fullgraph": (_V2, r"self\.cudagraph_manager\.run_fullgraph"),
    # Called by calling the model, which the wrapper has become.
    "CUDAGraphWrapper.__call__": (_V1, "CUDAGraphWrapper"),
    "BreakableCUDAGraphWrapper.__call__": (r"vllm\.v1\.worker\..*", "BreakableCUDAGraphWrapper"),
    "profile_cudagraph_memory": (r"vllm\.v1\.worker\.gpu_worker", r"self\.model_runner\.profile_cudagraph_memory"),
    "release_graphs": (r"vllm\.distributed\.elastic_ep\.elastic_execute", r"manager\.release_graphs"),
    "clear_graphs": (r"vllm\.compilation\.(cuda_graph|breakable_cudagraph)", r"instance\.clear_graphs"),
}
"""Who calls a target: modules, and the callee as it is written there. By ``Class.method``, or by the name alone."""


def uncalled(tree: VllmTree, version: str, points: Iterable[HookPoint]) -> list[str]:
    """Targets that vLLM does not call from where we think it does."""
    problems = []
    for point in expected(points, version):
        caller = CALLED.get(point.target) or CALLED.get(point.target.rpartition(".")[2])
        if caller is None:
            problems.append(f"{point.id}: CALLED does not say who calls it")
            continue
        modules, callee = caller
        found = (call for module in tree.modules(modules) for call in tree.calls(module))
        if not any(re.fullmatch(callee, call) for call in found):
            problems.append(f"{point.id}: no call of {callee} in {modules}")
    return problems


def outside_of_the_family(tree: VllmTree, version: str, points: Iterable[HookPoint]) -> list[str]:
    """Classes with an MLA method of the hooked name that no hooked family has, and whose time would be missed."""
    hooked = {
        (definition.module, definition.owner)
        for point in expected(points, version)
        if point.name in ("mla_decode", "mla_prefill")
        for definition in definitions(tree, version, point)
    }
    names = {p.target.rpartition(".")[2] for p in expected(points, version) if p.name in ("mla_decode", "mla_prefill")}
    problems = []
    for module in tree.modules(r"vllm\.(v1\.attention|model_executor\.layers\.attention)\..*"):
        for name in names:
            if f"def {name}(" not in tree.texts[module]:
                continue
            for node in ast.walk(tree.parsed(module)):
                if not isinstance(node, ast.ClassDef) or (module, node.name) in hooked:
                    continue
                if any(isinstance(item, ast.FunctionDef) and item.name == name for item in node.body):
                    problems.append(f"{module}:{node.name}.{name} is in no hooked family")
    return problems


# --- what hooks read of vLLM's objects -------------------------------------------------------------------------

_CONFIG = "vllm.config.compilation"
_OUTPUT = "vllm.v1.core.sched.output"
_WRAPPER = "vllm.compilation.cuda_graph"
_BREAKABLE = "vllm.compilation.breakable_cudagraph"
_MANAGER = "vllm.v1.worker.gpu.cudagraph_utils"
_FUSED = "vllm.model_executor.layers.fused_moe"

ATTRIBUTES = (
    (_OUTPUT, "SchedulerOutput", "scheduled_new_reqs", ""),
    (_OUTPUT, "SchedulerOutput", "scheduled_cached_reqs", ""),
    (_OUTPUT, "SchedulerOutput", "num_scheduled_tokens", ""),
    (_OUTPUT, "SchedulerOutput", "total_num_scheduled_tokens", ""),
    (_OUTPUT, "SchedulerOutput", "finished_req_ids", ""),
    (_OUTPUT, "CachedRequestData", "num_computed_tokens", ""),
    (_OUTPUT, "CachedRequestData", "num_output_tokens", ""),
    (_OUTPUT, "CachedRequestData", "req_ids", ""),
    (_OUTPUT, "NewRequestData", "num_computed_tokens", ""),
    ("vllm.v1.worker.worker_base", "WorkerBase", "vllm_config", ""),
    ("vllm.v1.worker.worker_base", "WorkerBase", "rank", ""),
    ("vllm.v1.worker.worker_base", "WorkerBase", "local_rank", ""),
    ("vllm.config.parallel", "ParallelConfig", "data_parallel_rank", ""),
    ("vllm.config.parallel", "ParallelConfig", "data_parallel_size", ""),
    ("vllm.config.parallel", "ParallelConfig", "tensor_parallel_size", ""),
    ("vllm.config.parallel", "ParallelConfig", "pipeline_parallel_size", ""),
    ("vllm.config.parallel", "ParallelConfig", "enable_expert_parallel", ""),
    ("vllm.config.model", "ModelConfig", "served_model_name", ""),
    (f"{_FUSED}.fused_moe_method_base", "FusedMoEMethodBase", "moe_kernel", ">=0.17"),
    (f"{_FUSED}.fused_moe_method_base", "FusedMoEMethodBase", "moe_mk", ">=0.16,<0.17"),
    (f"{_FUSED}.modular_kernel", "FusedMoEKernel", "fused_experts", ">=0.17"),
    (f"{_FUSED}.modular_kernel", "FusedMoEModularKernel", "fused_experts", "<0.17"),
    (f"{_FUSED}.runner.moe_runner", "MoERunner", "layer_name", ">=0.20"),
    (f"{_FUSED}.layer", "FusedMoE", "layer_name", "<0.24"),
    (f"{_FUSED}.routed_experts", "RoutedExperts", "layer_name", ">=0.24"),
    ("vllm.model_executor.layers.attention.mla_attention", "MLAAttention", "layer_name", ">=0.16"),
    (f"{_COMM}.cpu_communicator".replace("\\", ""), "CpuCommunicator", "dist_module", ""),
    ("vllm.forward_context", "BatchDescriptor", "num_tokens", ""),
    ("vllm.forward_context", "ForwardContext", "batch_descriptor", ""),
    (_CONFIG, "CUDAGraphMode", "decode_mode", ""),
    (_CONFIG, "CompilationConfig", "cudagraph_mode", ""),
    (_CONFIG, "CompilationConfig", "static_forward_context", ""),
    (_WRAPPER, "CUDAGraphWrapper", "concrete_cudagraph_entries", ""),
    (_WRAPPER, "CUDAGraphWrapper", "runtime_mode", ""),
    (_WRAPPER, "CUDAGraphWrapper", "_all_instances", ">=0.20"),
    (_BREAKABLE, "BreakableCUDAGraphWrapper", "entries", ">=0.22"),
    (_BREAKABLE, "BreakableCUDAGraphWrapper", "_all_instances", ">=0.22"),
    ("vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher", "get_capture_descs", ""),
    (_MANAGER, "CudaGraphManager", "graphs", ">=0.20"),
    (_MANAGER, "CudaGraphManager", "compilation_config", ">=0.20"),
    (_MANAGER, "CudaGraphManager", "_capture_descs", ">=0.20"),
    (_MANAGER, "ModelCudaGraphManager", "graphs", ">=0.20"),
    (_MANAGER, "BatchExecutionDescriptor", "cg_mode", ">=0.20"),
    (_MANAGER, "BatchExecutionDescriptor", "num_tokens", ">=0.20"),
)
"""(module, class, attribute, releases in which a hook reads it)."""

FUNCTIONS = (
    ("vllm.forward_context", "get_forward_context"),
    ("vllm.forward_context", "is_forward_context_available"),
    ("vllm.v1.metrics.prometheus", "get_prometheus_registry"),
)

TEXTS = (
    ("vllm.envs", r'"VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"', ">=0.17"),
    ("vllm.v1.utils", r'name=f"ApiServer', ""),
    ("vllm.plugins", r'"vllm\.general_plugins"', ""),
)
"""(module, what its text must hold, releases)."""


def missing_attributes(tree: VllmTree, version: str) -> list[str]:
    """What hooks read of vLLM's objects and modules, and is not there."""
    problems = [
        f"{module}:{cls} has no {attribute}"
        for module, cls, attribute, versions in ATTRIBUTES
        if version_matches(version, versions) and attribute not in tree.assigned(module, cls)
    ]
    problems += [
        f"{module} has no {function}" for module, function in FUNCTIONS if not tree.find_function(module, function)
    ]
    return problems + [
        f"{module} says nothing of {text}"
        for module, text, versions in TEXTS
        if version_matches(version, versions) and not re.search(text, tree.texts.get(module, ""))
    ]


def unlike_dispatches(tree: VllmTree, version: str, points: Iterable[HookPoint]) -> list[str]:
    """Graph dispatches that do not return what `describe_dispatch` reads: (mode, descriptor, …) or (descriptor, …)."""
    problems = []
    for point in expected(points, version):
        if point.kind is HookKind.GRAPH_DISPATCH:
            for definition in definitions(tree, version, point):
                returns = definition.node.returns
                text = ast.unparse(returns) if returns else "nothing that is written down"
                if not re.match(r"tuple\[(CUDAGraphMode, BatchDescriptor|BatchExecutionDescriptor), ", text):
                    problems.append(f"{definition.where} returns {text}")
    return problems


def all_problems(tree: VllmTree, version: str, points: Iterable[HookPoint]) -> list[str]:
    """Everything that is not as the table claims."""
    points = list(points)
    return [
        *missing_targets(tree, version, points),
        *shadowed_targets(tree, version, points),
        *unexpected_targets(tree, version, points),
        *uncovered(version, points),
        *misread_arguments(tree, version, points),
        *positional_flags(tree),
        *uncalled(tree, version, points),
        *outside_of_the_family(tree, version, points),
        *missing_attributes(tree, version),
        *unlike_dispatches(tree, version, points),
    ]
