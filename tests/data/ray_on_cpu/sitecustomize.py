"""Lets vLLM's CPU build run its workers through Ray, where the cluster says that it has GPUs. For one test only."""

from typing import Any

import wrapt


def _has_a_key(module: Any) -> None:
    module.CpuPlatform.ray_device_key = "GPU"


wrapt.register_post_import_hook(_has_a_key, "vllm.platforms.cpu")
