"""Rings -> Prometheus: in vLLM's own /metrics, or from a stand-alone exporter."""
