"""DeepSeek-V4's attention with FlashMLA and DeepGEMM, a backend of dsv4core."""

__version__ = "0.1.0"
