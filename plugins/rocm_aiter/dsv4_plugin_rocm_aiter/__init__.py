"""DeepSeek-V4's attention with AITER on AMD's GPUs, a backend of dsv4core."""

__version__ = "0.1.0"
