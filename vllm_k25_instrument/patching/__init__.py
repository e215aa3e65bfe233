"""Source patches for vLLM: reading them, telling what is applied to a tree, applying and reverting."""
