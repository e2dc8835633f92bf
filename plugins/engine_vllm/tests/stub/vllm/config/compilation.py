"""Compilation and graphs."""


class CompilationConfig:
    """What dsv4-vllm reads of it."""

    cudagraph_mode: object = None


class CUDAGraphMode:
    """What is captured."""

    def has_full_cudagraphs(self):
        """Asked of it."""

    def mixed_mode(self):
        """Asked of it."""

    def decode_mode(self):
        """Asked of it."""
