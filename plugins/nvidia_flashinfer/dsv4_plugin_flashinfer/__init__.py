"""DeepSeek-V4's attention with FlashInfer, a backend of dsv4core."""

__version__ = "0.1.0"
