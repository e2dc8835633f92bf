"""The configuration as plain dataclasses: they work without Hydra, which is only one way to fill them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

from dsv4core.api import BackendOptions, ConfigError
from dsv4core.api.selection import Probe, Seam
from dsv4core.framework.order import check_order
from dsv4core.framework.platform import machine_named
from dsv4core.kvcache import INDEX_DTYPES, KV_CACHE_DTYPES

DTYPES = ("bfloat16", "float32")
BENCH_VALUES = {
    "op": (
        *("plan_step", "project", "insert_kv", "compress", "indexer", "forward_mqa", "o_proj", "layer"),
        *(
            "forward_mqa.step",
            "layer.step",
            "indexer.logits",
            "indexer.topk",
            "mixed_table",
            "inverse_rope_quant",
            "wq_b",
            "wo_b",
            "prepare_step",
        ),
    ),
    "phase": ("decode", "prefill", "mixed"),
    "kind": ("swa", "c4a", "c128a"),
}
"""What lists of `bench` may name."""


def key(text: str, default: Any, *choices: str) -> Any:
    """A field: its help text, its default or what makes it, and the values that are allowed."""
    metadata = {"help": text, "choices": choices}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def leaves(options: object, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """All keys below a dataclass: their dotted name, their field, their value."""
    for own in fields(options):  # type: ignore[arg-type]
        value = getattr(options, own.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{own.name}.")
        else:
            yield f"{prefix}{own.name}", own, value


def settable(config: DSV4Config) -> dict[str, Field[Any]]:
    """The keys that a user may set, with their fields; `backend` and `model` take a name instead."""
    return {name: own for name, own, _ in leaves(config) if name not in ("backend.name", "model.name")}


@dataclass
class AutoOptions(BackendOptions):
    """Options of `backend=auto`: it takes the first backend of an order that can run the request.

    Attributes:
        order: Names to try by machine; of `sm_90_heads_16`, `sm_90`, `cuda_heads_16` and `cuda`, the first.
            What is not given is as `dsv4core.framework.order.DEFAULT_ORDER` has it.

    Raises:
        ConfigError: A key names no machine.
    """

    name: str = "auto"
    order: dict[str, list[str]] = key("backends to try, by architecture or platform", dict)

    def __post_init__(self) -> None:
        """Refuse an order that would never be looked at."""
        check_order(self.order)


@dataclass
class ModelOptions:
    """The model's preset. With a checkpoint, the checkpoint's own config.json decides instead.

    Attributes:
        name: A name from `dsv4core.model.shapes.PRESETS`.
    """

    name: str = "tiny"


@dataclass
class PluginsOptions:
    """What is not loaded, whoever installed it."""

    disable: list[str] = key("backends or distributions never to load", list)


@dataclass
class PageSizesOptions:
    """Rows a page, as in `dsv4core.api.PageSizes`."""

    window: int = key("rows of a window page", 64)
    context: int = key("raw tokens that a page of compressed entries stands for", 256)
    state: int = key("most rows of a compressor-state page", 8)


@dataclass
class RequestOptions:
    """What `dsv4 explain` asks for: another machine's request, or an engine's. Fields as in `Request`.

    Raises:
        ConfigError: A value is out of range or not known.
    """

    arch: str | None = key("sm_100, gfx942, cpu, …; null: this machine's", None)
    tensor_parallel: int = key("ranks that share the heads", 1)
    context_parallel: int = key("ranks that share the context", 1)
    decode_query_len: int = key("most query tokens of a decode request", 1)
    graph: bool = key("decode steps will be captured", False)
    strided_pages: bool = key("the host's pages are strided", False)
    private_output: bool = key("a backend may keep its attention output to itself", True)
    host_lengths: bool = key("the host knows a step's lengths", True)
    deterministic: bool = key("a row's output must not depend on its batch", False)
    seam: str = key("depth at which the host uses the backend", "layer", *get_args(Seam))
    probe: str = key("host: import kernel libraries; static: metadata only", "static", *get_args(Probe))
    page_sizes: PageSizesOptions = field(default_factory=PageSizesOptions)

    def __post_init__(self) -> None:
        """Refuse what no host could ask."""
        _check_choices(self, "request.")
        _check_least(self, "request.", tensor_parallel=1, context_parallel=1, decode_query_len=1)
        if self.arch is not None:
            machine_named(self.arch)


@dataclass
class BenchOptions:
    """What `dsv4 bench` measures: every combination of the lists.

    Raises:
        ConfigError: A list is empty, a value of it is not known, or the mode serves no such phase.
    """

    op: list[str] = key("operations", lambda: ["forward_mqa", "layer"])
    phase: list[str] = key("decode, prefill, mixed", lambda: ["decode"])
    kind: list[str] = key("layer kinds", lambda: ["c4a"])
    tokens: list[int] = key("query tokens of a step: requests, where they decode", lambda: [1, 8])
    context: list[int] = key("tokens of each request", lambda: [4096])
    mode: str = key("graph where it can be captured, or not at all", "auto", "auto", "graph", "eager")
    peers: list[str] = key("measured beside: torch, flashmla, flashinfer, deepgemm, transformers", list)
    out: str | None = key("file of JSON lines that keeps the rows; null: none", None)
    plot: str | None = key("folder for plots; null: none", None)
    commit: str | None = key("commit that rows name; null: git is asked", None)

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        _check_choices(self, "bench.")
        for name, known in BENCH_VALUES.items():
            values = getattr(self, name)
            unknown = [value for value in values if value not in known]
            if unknown or not values:
                found = unknown[0] if unknown else "nothing"
                raise ConfigError(f"bench.{name} names {found}; use some of {', '.join(known)}.")
        for name in ("tokens", "context"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ConfigError(f"bench.{name}={getattr(self, name)} cannot be; give numbers from 1 on.")
        uncaptured = [phase for phase in self.phase if phase != "decode"]
        if self.mode == "graph" and uncaptured:
            raise ConfigError(
                f"bench.mode=graph cannot capture {uncaptured[0]} steps: backends plan those by their "
                "lengths; use bench.mode=auto, or bench.phase=[decode]."
            )


@dataclass
class DSV4Config:
    """The root of the configuration: each field is a key, and its help text says what it is.

    Raises:
        ConfigError: A value is out of range or not known.
    """

    backend: BackendOptions = key("who computes: auto, or an installed backend's name", AutoOptions)
    model: ModelOptions = key("preset of the model's sizes, where no checkpoint gives them", ModelOptions)
    checkpoint: str | None = key("folder of a checkpoint; null: one with random weights is written", None)
    scales: str | None = key("file of scales for plain FP8 caches, by dsv4 calibrate", None)
    kv_cache_dtype: str = key("format of the KV caches", "auto", *KV_CACHE_DTYPES)
    index_dtype: str = key("format of the indexer's keys", "auto", *INDEX_DTYPES)
    device: str = key("torch device: auto, cpu, cuda, cuda:1", "auto")
    dtype: str = key("dtype of activations", "bfloat16", *DTYPES)
    prompt: str = key("text to prefill, or @FILE; empty: random tokens", "")
    prefill: int = key("tokens of the prompt", 400)
    decode: int = key("tokens decoded after it", 16)
    batch: int = key("requests side by side", 2)
    chunk: int = key("most tokens of one prompt in one step", 256)
    layers: list[int] | None = key("layer numbers to run; null: all", None)
    verify: bool = key("compare with the reference", False)
    seed: int = key("seed of random tokens and weights", 0)
    json: bool = key("print JSON", False)
    plugins: PluginsOptions = field(default_factory=PluginsOptions)
    request: RequestOptions = field(default_factory=RequestOptions)
    bench: BenchOptions = field(default_factory=BenchOptions)

    def __post_init__(self) -> None:
        """Refuse values that no run could use."""
        _check_choices(self)
        _check_least(self, prefill=0, decode=0, batch=1, chunk=1, seed=0)
        if self.seed >= 1 << 32:
            raise ConfigError(f"seed={self.seed} is too large; the most is {(1 << 32) - 1}.")
        if self.prefill + self.decode == 0:
            raise ConfigError("prefill=0 and decode=0 leave nothing to run; set one of them.")
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise ConfigError(f"layers={self.layers} cannot be run; give numbers from 0 on, or null for all.")


def _check_choices(options: object, prefix: str = "") -> None:
    for name, own, value in leaves(options, prefix):
        choices = own.metadata.get("choices")
        if choices and value not in choices:
            *names, last = map(str, choices)
            raise ConfigError(f"{name}={value} is not known; use {', '.join(names)} or {last}.")


def _check_least(options: object, prefix: str = "", **bounds: int) -> None:
    for name, least in bounds.items():
        value = getattr(options, name)
        if value < least:
            raise ConfigError(f"{prefix}{name}={value} is too small; the least is {least}.")


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
