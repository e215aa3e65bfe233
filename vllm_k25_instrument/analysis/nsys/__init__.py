"""nsys exports (SQLite) and reports (``.nsys-rep``) into captures; `read_nsys` is the way in."""

from vllm_k25_instrument.analysis.nsys.reader import read_nsys

__all__ = ["read_nsys"]
