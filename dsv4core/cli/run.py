"""`dsv4 run`: the attention stack of a checkpoint, prefill then decode, measured and verified.

It is the attention stack, not the whole model: the residual stream starts as the embedding of the tokens, and
each layer adds its attention. Decoding is teacher-forced with the tokens that follow.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from dsv4core.api.errors import ConfigError
from dsv4core.api.layer import LayerScales
from dsv4core.api.model import ModelShape
from dsv4core.attention import Observe
from dsv4core.cli.report import Report, human_bytes, print_report
from dsv4core.cli.timing import OperationTimer
from dsv4core.cli.tokens import Tokens, prompt_tokens, random_tokens
from dsv4core.cli.verify import Shadow, shadow_request
from dsv4core.config import DSV4Config, RequestOptions
from dsv4core.framework.platform import machine_of, torch_device
from dsv4core.framework.request import build_request, configured_shape, select_configured
from dsv4core.framework.selection import select
from dsv4core.model.checkpoint import Checkpoint
from dsv4core.model.random_checkpoint import FORMAT, random_checkpoint_bytes, write_random_checkpoint
from dsv4core.model.scales import read_scales
from dsv4core.stack import AttentionStack, load_layer

Item = TypeVar("Item")


@dataclass(frozen=True)
class Chunk:
    """One step of a run: the same number of query tokens for each request."""

    phase: str
    start: int
    tokens: int


def run(config: DSV4Config) -> int:
    """Run, print the report, and return the exit code: 1 where a verification fails.

    Raises:
        DSV4Error: The configuration, the checkpoint or the backend does not allow the run.
    """
    if config.request != RequestOptions():
        raise ConfigError(
            "request.* is for dsv4 explain; leave it out of dsv4 run, which asks for what it does."
        )
    report = _measure(config)
    print_report(report, as_json=config.json)
    return 0 if report.verification is None or report.verification.ok else 1


@dataclass(frozen=True, eq=False)
class Job:
    """What a configuration asks to be computed, ready to begin.

    Attributes:
        config: The configuration.
        device: Where.
        checkpoint: The weights.
        tokens: Of all requests.
        stack: The layers.
        scales: Of plain FP8 caches, from a file.
    """

    config: DSV4Config
    device: torch.device
    checkpoint: Checkpoint
    tokens: Tokens
    stack: AttentionStack
    scales: Mapping[int, LayerScales]

    def chunks(self) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Each step's tokens, and their embeddings `[tokens, hidden_size]`."""
        dtype = getattr(torch, self.config.dtype)
        for chunk in _track(planned_chunks(self.config), "prefill and decode"):
            ids = self.tokens.ids[:, chunk.start : chunk.start + chunk.tokens].flatten()
            yield chunk, self.checkpoint.embedding(ids).to(device=self.device, dtype=dtype)


def prepare(config: DSV4Config, observe: Callable[[torch.device], Observe]) -> Job:
    """Select a backend and load the layers.

    Args:
        config: The configuration.
        observe: Makes what wraps each operation.

    Raises:
        DSV4Error: The configuration, the checkpoint or the backend does not allow it.
    """
    device = torch_device(config.device)
    # All that can be refused is, before a checkpoint of random weights is written or a real one is read.
    shape = configured_shape(config)
    layers = _layer_numbers(config, shape)
    _check_lengths(config, shape)
    scales = read_scales(config.scales) if config.scales else {}
    selection = select_configured(config, build_request(config, shape, machine_of(device), probe="host"))
    checkpoint = Checkpoint.open(_checkpoint_directory(config))
    checkpoint.verify(layers)
    tokens, own = _tokens(config, checkpoint), observe(device)
    loaded = [
        load_layer(selection, checkpoint, index, device, own, scales=scales)
        for index in _track(layers, "loading weights")
    ]
    return Job(config, device, checkpoint, tokens, AttentionStack(selection, loaded, device), scales)


def _measure(config: DSV4Config) -> Report:
    timer = OperationTimer(torch_device(config.device))
    job = prepare(config, lambda device: timer)
    stack, device = job.stack, job.device
    stack.warm_up()
    timer.seconds.clear()
    shadow = _shadow(job) if config.verify else None
    seconds = _compute(job, timer, shadow)
    return Report(
        selection=stack.selection,
        checkpoint=job.checkpoint.directory,
        specs=tuple(layer.spec for layer in stack.layers),
        tokens=job.tokens,
        prefill_tokens=config.batch * config.prefill,
        decode_tokens=config.batch * config.decode,
        seconds=seconds,
        operations={phase: dict(times) for phase, times in timer.seconds.items()},
        cache_bytes=stack.pools.nbytes,
        peak_bytes=_peak_bytes(device),
        device=str(device),
        verification=shadow.result() if shadow is not None else None,
    )


def _compute(job: Job, timer: OperationTimer, shadow: Shadow | None) -> dict[str, float]:
    """Run all steps; seconds of each phase, without embedding and verification."""
    seconds, stack, batch = {"prefill": 0.0, "decode": 0.0}, job.stack, job.config.batch
    for chunk, embedded in job.chunks():
        timer.phase, x = chunk.phase, embedded
        computed, query = [chunk.start] * batch, [chunk.tokens] * batch
        start = time.perf_counter()
        with timer("plan"):
            step = stack.plan(computed, query)
        seconds[chunk.phase] += time.perf_counter() - start
        if shadow is not None:
            shadow.plan(computed, query)
        for layer in stack.layers:
            start = time.perf_counter()
            hidden = stack.normalise(layer, x)
            out, selected = stack.attend(layer, hidden, step)
            x = x + out
            seconds[chunk.phase] += time.perf_counter() - start
            if shadow is not None:
                shadow.compare(layer.spec.index, hidden, out, selected)
    return seconds


def planned_chunks(config: DSV4Config) -> list[Chunk]:
    """The steps of a run: the prompt's chunks, then decodes."""
    prefill = [
        Chunk("prefill", start, min(config.chunk, config.prefill - start))
        for start in range(0, config.prefill, config.chunk)
    ]
    return prefill + [Chunk("decode", config.prefill + i, 1) for i in range(config.decode)]


def _shadow(job: Job) -> Shadow:
    selection, device = job.stack.selection, job.device
    reference = select(shadow_request(selection), "reference")
    loaded = [
        load_layer(reference, job.checkpoint, layer.spec.index, device, scales=job.scales)
        for layer in _track(job.stack.layers, "loading the reference's weights")
    ]
    return Shadow(AttentionStack(reference, loaded, device), selection)


def _tokens(config: DSV4Config, checkpoint: Checkpoint) -> Tokens:
    count = config.prefill + config.decode
    if not config.prompt:
        return random_tokens(checkpoint.vocab_size, config.batch, count, config.seed)
    return prompt_tokens(config.prompt, checkpoint.directory, checkpoint.vocab_size, config.batch, count)


def _check_lengths(config: DSV4Config, shape: ModelShape) -> None:
    most, asked = shape.max_position_embeddings, config.prefill + config.decode
    if asked > most:
        raise ConfigError(
            f"prefill={config.prefill} and decode={config.decode} make {asked} tokens, and the model has "
            f"{most} positions; ask for fewer."
        )


def _layer_numbers(config: DSV4Config, shape: ModelShape) -> list[int]:
    count = shape.num_hidden_layers
    layers = list(range(count)) if config.layers is None else list(config.layers)
    beyond = [index for index in layers if index >= count]
    if beyond:
        raise ConfigError(f"layers={layers}: layer {beyond[0]} does not exist; the model has {count} layers.")
    if len(set(layers)) < len(layers):
        raise ConfigError(
            f"layers={layers} names a layer twice, and each has one set of caches; name it once."
        )
    return layers


def _checkpoint_directory(config: DSV4Config) -> Path:
    """The asked checkpoint, or one with random weights, written on first use."""
    if config.checkpoint is not None:
        return Path(config.checkpoint).expanduser()
    shape = configured_shape(config)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    only = "" if config.layers is None else "-layers" + "-".join(map(str, sorted(config.layers)))
    name = f"{config.model.name}-v{FORMAT}-seed{config.seed}{only}"
    directory = cache / "dsv4core" / name
    if not directory.exists():
        size = human_bytes(random_checkpoint_bytes(shape, config.layers))
        print(f"dsv4: writing a checkpoint with random weights ({size}) to {directory}", file=sys.stderr)
        write_random_checkpoint(directory, shape, config.seed, config.layers, _progress("writing layers"))
    return directory


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _progress(what: str) -> Callable[[Iterable[Item]], Iterable[Item]]:
    return partial(_track, what=what)


def _track(items: Iterable[Item], what: str) -> Iterable[Item]:
    """A progress bar on stderr while the items are worked on; nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if not console.is_terminal:
        return items
    return track(list(items), what, console=console, transient=True)
