"""vLLM's enumeration of CUDA graph modes, as far as the adapter asks."""

from __future__ import annotations


class GraphMode:
    """As vLLM's enumeration: what decode steps and what mixed steps are captured as."""

    def __init__(self, decode: str, mixed: str) -> None:
        self.decode, self.mixed = decode, mixed

    def decode_mode(self) -> str:
        return self.decode

    def mixed_mode(self) -> str:
        return self.mixed

    def has_full_cudagraphs(self) -> bool:
        return "FULL" in (self.decode, self.mixed)
