"""The configuration as plain dataclasses: they work without Hydra, which is only one way to fill them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dsv4core.api import BackendOptions, ConfigError
from dsv4core.framework.selection import DEFAULT_ORDER
from dsv4core.kvcache import INDEX_DTYPES, KV_CACHE_DTYPES

DTYPES = ("bfloat16", "float32")


def _default_order() -> dict[str, list[str]]:
    return {key: list(names) for key, names in DEFAULT_ORDER.items()}


@dataclass
class AutoOptions(BackendOptions):
    """Options of `backend=auto`: it takes the first backend of an order that can run the request.

    Attributes:
        order: Names by architecture (`sm_90`) or, where that has none, by platform (`cpu`, `cuda`, `rocm`).
        exclude: Names that are never taken.
    """

    name: str = "auto"
    order: dict[str, list[str]] = field(
        default_factory=_default_order, metadata={"help": "backends to try, by architecture or platform"}
    )
    exclude: list[str] = field(default_factory=list, metadata={"help": "backends never to take"})


@dataclass
class ModelOptions:
    """The model's preset. With a checkpoint, the checkpoint's own config.json decides instead.

    Attributes:
        name: A name from `dsv4core.model.shapes.PRESETS`.
    """

    name: str = "tiny"


@dataclass
class DSV4Config:
    """The root of the configuration: each field is a key, and its help text says what it is.

    Raises:
        ConfigError: A value is out of range or not known.
    """

    backend: BackendOptions = field(
        default_factory=AutoOptions, metadata={"help": "who computes: auto, or an installed backend's name"}
    )
    model: ModelOptions = field(
        default_factory=ModelOptions,
        metadata={"help": "preset of the model's sizes, where no checkpoint gives them"},
    )
    checkpoint: str | None = field(
        default=None, metadata={"help": "folder of a checkpoint; null: one with random weights is written"}
    )
    kv_cache_dtype: str = field(
        default="auto", metadata={"help": f"format of the KV caches: {', '.join(KV_CACHE_DTYPES)}"}
    )
    index_dtype: str = field(
        default="auto", metadata={"help": f"format of the indexer's keys: {', '.join(INDEX_DTYPES)}"}
    )
    device: str = field(default="auto", metadata={"help": "torch device: auto, cpu, cuda, cuda:1"})
    dtype: str = field(default="bfloat16", metadata={"help": f"dtype of activations: {' or '.join(DTYPES)}"})
    prompt: str = field(default="", metadata={"help": "text to prefill, or @FILE; empty: random tokens"})
    prefill: int = field(default=400, metadata={"help": "tokens of the prompt"})
    decode: int = field(default=16, metadata={"help": "tokens decoded after it"})
    batch: int = field(default=2, metadata={"help": "requests side by side"})
    chunk: int = field(default=256, metadata={"help": "most tokens of one prompt in one step"})
    layers: list[int] | None = field(default=None, metadata={"help": "layer numbers to run; null: all"})
    verify: bool = field(default=False, metadata={"help": "compare with the reference"})
    seed: int = field(default=0, metadata={"help": "seed of random tokens and weights"})
    json: bool = field(default=False, metadata={"help": "print JSON"})

    def __post_init__(self) -> None:
        """Refuse values that no run could use."""
        for name, least in {"prefill": 0, "decode": 0, "batch": 1, "chunk": 1, "seed": 0}.items():
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name}={value} is too small; the least is {least}.")
        if self.seed >= 1 << 32:
            raise ConfigError(f"seed={self.seed} is too large; the most is {(1 << 32) - 1}.")
        if self.prefill + self.decode == 0:
            raise ConfigError("prefill=0 and decode=0 leave nothing to run; set one of them.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype} is not known; use {' or '.join(DTYPES)}.")
        for name, table in {"kv_cache_dtype": KV_CACHE_DTYPES, "index_dtype": INDEX_DTYPES}.items():
            if getattr(self, name) not in table:
                *names, last = table
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not known; use {', '.join(names)} or {last}."
                )
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise ConfigError(f"layers={self.layers} cannot be run; give numbers from 0 on, or null for all.")


def read_prompt(value: str) -> str:
    """The text of a `prompt`: itself, or the contents of FILE where it is `@FILE`.

    Raises:
        ConfigError: The file cannot be read, is not UTF-8, or is empty.
    """
    if not value.startswith("@"):
        return value
    path = Path(value[1:]).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt={value}: {path} is not UTF-8 text (byte {error.start}).") from error
    except OSError as error:
        raise ConfigError(f"prompt={value}: {path} cannot be read: {error.strerror}.") from error
    if not text.strip():
        raise ConfigError(f"prompt={value}: {path} is empty.")
    return text
