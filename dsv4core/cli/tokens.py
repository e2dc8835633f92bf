"""The token ids that a run is fed: from a prompt, or random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4core.api.errors import ConfigError


@dataclass(frozen=True)
class Tokens:
    """Token ids of each request `[batch, count]` int64 on the host, and where they come from, for people."""

    ids: torch.Tensor
    source: str


def random_tokens(vocab_size: int, batch: int, count: int, seed: int) -> Tokens:
    """Uniform token ids; the same seed gives the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return Tokens(torch.randint(vocab_size, (batch, count), generator=generator), f"random, seed {seed}")


def prompt_tokens(text: str, checkpoint: Path, vocab_size: int, batch: int, count: int) -> Tokens:
    """Token ids of a prompt, repeated up to `count`, the same for each request.

    The checkpoint's tokenizer.json is used where it has one, else each UTF-8 byte is a token.

    Raises:
        ConfigError: The tokenizer's package is not installed, or its ids do not fit the vocabulary.
    """
    path = checkpoint / "tokenizer.json"
    ids, how = _tokenised(text, path) if path.is_file() else (_encoded(text), "UTF-8 bytes")
    if not ids:
        raise ConfigError(f"the prompt has no tokens ({how}); give some text.")
    largest = max(ids)
    if largest >= vocab_size:
        raise ConfigError(
            f"the prompt's token {largest} ({how}) is outside the vocabulary of {vocab_size}; use a "
            "checkpoint "
            "whose vocabulary fits, or plain ASCII text."
        )
    source = f"{len(ids)} prompt tokens ({how})"
    if len(ids) < count:
        source += f", repeated to {count}"
    elif len(ids) > count:
        source += f", the first {count}"
    row = torch.tensor(ids).repeat(-(-count // len(ids)))[:count]
    return Tokens(row.expand(batch, -1), source)


def _tokenised(text: str, path: Path) -> tuple[list[int], str]:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "the prompt needs the checkpoint's tokenizer, and the package tokenizers is not installed; run "
            f"`pip install tokenizers`, or leave the prompt out for random tokens ({path.name} was found)."
        ) from error
    try:
        return Tokenizer.from_file(str(path)).encode(text).ids, "tokenizer.json"
    except Exception as error:  # the tokenizers package raises bare Exceptions
        raise ConfigError(
            f"{path} cannot tokenise the prompt: {error}; get it again, or leave it out."
        ) from error


def _encoded(text: str) -> list[int]:
    try:
        return list(text.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the prompt is not UTF-8 text (character {error.start}); save it as UTF-8."
        ) from error
