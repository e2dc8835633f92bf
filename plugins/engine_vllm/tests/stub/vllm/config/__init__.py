"""vLLM's configuration."""
