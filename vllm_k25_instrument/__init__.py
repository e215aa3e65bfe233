"""Where every microsecond of a vLLM decode step goes: live, per rank, with numbers that add up."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vllm-k25-instrument")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"
