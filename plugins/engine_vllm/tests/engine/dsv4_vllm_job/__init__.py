"""The environment of the engine job: vLLM's CPU build, made to run DeepSeek-V4 on this machine."""
