"""Files -> the same breakdown: torch.profiler traces, nsys exports, key_averages tables; the kernel classifier."""
