"""Fixtures of the contract tests."""

from tests.contract.test_sim_runs_vllm_graphs import gpu

__all__ = ["gpu"]
