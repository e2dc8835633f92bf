"""DeepSeek-V4's attention in kernels of its own for sm_90, a backend of dsv4core."""

__version__ = "0.1.0"
