"""A stand-in for vLLM: what dsv4-vllm touches of it, and no more."""
