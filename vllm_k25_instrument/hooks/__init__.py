"""What is wrapped in vLLM: the table, the patcher, one file per vLLM subsystem."""
