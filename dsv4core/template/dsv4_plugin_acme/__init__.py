"""DeepSeek-V4 attention on acme."""
