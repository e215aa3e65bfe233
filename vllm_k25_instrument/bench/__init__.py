"""Micro-benchmarks at the model's exact sizes, through vLLM's own kernels and communicators."""
