"""The model: sizes and layer kinds from a config, RoPE, and weights from a checkpoint."""
