"""One file per command of `vllm-k25`: arguments in, exit code out; the work is done elsewhere."""
