"""A server to try the instruments on: a tiny Kimi-K2.5, vLLM's CPU or CUDA build, and some load."""
