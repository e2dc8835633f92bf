"""DeepSeek-V4's attention in vLLM on the backend that `additional_config={"dsv4": {"backend": …}}` names."""

__version__ = "0.1.0"
