"""DeepSeek-V4's attention layer for every accelerator: mathematics, caches, and a contract for backends."""

__version__ = "0.1.0"
