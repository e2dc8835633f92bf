"""What all attention layers of one vLLM worker share: the request, the selection, and the steps."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from dsv4_vllm.options import AdapterOptions, parse, section
from dsv4core.api import (
    BackendOptions,
    ConfigError,
    DSV4Error,
    LayerKind,
    LayerSpec,
    LayerWeights,
    Limits,
    ModelShape,
    PageSizes,
    Request,
    Weight,
)
from dsv4core.framework.binding import BoundKind, BoundLayer, bind_kind, bind_layer
from dsv4core.framework.discovery import discover
from dsv4core.framework.manager import load_backend
from dsv4core.framework.platform import machine_of
from dsv4core.framework.selection import Selection, select
from dsv4core.framework.wording import one_line
from dsv4core.model.shapes import layer_spec, model_shape

logger = logging.getLogger("vllm.dsv4")


class Host:
    """One worker's choice of a backend, made once, and the kind states of its steps."""

    def __init__(self, vllm_config: Any) -> None:
        options = parse(section(vllm_config))
        self.rank, self.ranks = _tensor_parallel()
        self.shape = _shape(vllm_config)
        self.device = _device(vllm_config)
        self.request = _request(vllm_config, self.shape, self.ranks, self.device)
        self.selection = _agreed(lambda: _select(self.request, options))
        self._check_layout()
        self._check_graphs()
        self._rope: dict[int, torch.Tensor] = {}
        self._bound: list[BoundLayer] = []
        self._kinds: dict[str, dict[tuple[int, ...], BoundKind]] = defaultdict(dict)
        self._log()

    @property
    def padded_heads(self) -> int:
        """Head axis of q, which vLLM allocates alike for all layers."""
        sizes = {plan.padded_q_heads for plan in self.selection.plans.values()}
        if len(sizes) > 1:
            raise ConfigError(
                f"backend={self.selection.backend.name} pads q differently by layer kind ({sizes}), and "
                "vLLM has one size for all; choose another backend."
            )
        return sizes.pop()

    def spec(self, index: int) -> LayerSpec:
        """Layer `index` on this rank."""
        return layer_spec(self.shape, index, self.rank, self.ranks)

    def kind(self, kind: LayerKind, tables: tuple[int, ...]) -> BoundKind:
        """The state of a layer kind for one set of block tables: vLLM may give layers of a kind several.

        Args:
            kind: The layer kind.
            tables: Addresses of the block tables, which stay where they are from step to step.

        Raises:
            DSV4Error: They do not stay, so that a captured graph would read freed memory.
        """
        bound = self._kinds[kind.name]
        if tables not in bound:
            if len(bound) == self.shape.num_hidden_layers:
                raise DSV4Error(
                    f"vLLM's block tables for layers of kind {kind.name} move between steps, and a "
                    "backend's state is made for tables that stay; this version of vLLM is not served."
                )
            bound[tables] = bind_kind(self.selection, kind, self.device)
        return bound[tables]

    def bind(self, index: int, sink: torch.Tensor, rope: torch.Tensor) -> BoundLayer:
        """Build the state of layer `index`; vLLM keeps all weights but these.

        Args:
            index: Layer number.
            sink: `[padded heads]` fp32, this rank's.
            rope: `[positions, rope_dim]`, cosines and sines; layers share it, and so do our fp32 copies.
        """
        spec = self.spec(index)
        table = self._rope.setdefault(rope.data_ptr(), rope.float())
        weights = LayerWeights({"attn_sink": Weight(sink[: spec.num_heads])}, table)
        self._bound.append(bind_layer(self.selection, spec, weights, self.device))
        return self._bound[-1]

    def report_weights(self) -> None:
        """Log, at the first step, what the backend keeps of weights besides vLLM's own."""
        if self._bound:
            prepared = sum(layer.describe().get("prepared_bytes", 0) for layer in self._bound)
            count = len(self._bound)
            logger.info("dsv4: %d layers built; the backend prepared %d bytes of weights.", count, prepared)
            self._bound = []

    def check_pages(self, window: int, context: int | None) -> None:
        """Check that vLLM's pages are those that the backend was asked about.

        Raises:
            ConfigError: They are not; vLLM settles their sizes after it has made the layers.
        """
        sizes = self.request.page_sizes
        if window != sizes.window or context not in (None, sizes.context):
            raise ConfigError(
                f"vLLM's pages have {window} window rows and stand for {context} tokens, and the backend was "
                f"asked about {sizes.window} and {sizes.context}; set block_size={sizes.context}."
            )

    def _check_layout(self) -> None:
        layout = self.selection.layout
        for cache in (layout.window, layout.compressed):
            if cache.name != "fp8_ds_mla":
                raise ConfigError(
                    f"backend={self.selection.backend.name} reads {cache.name} caches, and vLLM writes "
                    "fp8_ds_mla here; set kv_cache_dtype=fp8, or choose another backend."
                )

    def _check_graphs(self) -> None:
        if self.request.graph and self.selection.backend.implements("dsv4_prepare_step"):
            raise ConfigError(
                f"backend={self.selection.backend.name} has host work before every replay of a graph, and "
                "vLLM has no place for it; set enforce_eager=True, or choose another backend."
            )

    def _log(self) -> None:
        chosen = self.selection
        why = "as asked" if chosen.asked != "auto" else "the first of auto's order that can run"
        for name, count in Counter(kind.name for kind in self.shape.layer_kinds).items():
            variant = chosen.plans[name].variant or "default"
            logger.info(
                "dsv4: %d layers of kind %s run on %s (%s), variant %s: %s.",
                count,
                name,
                chosen.backend.name,
                chosen.backend.record.source,
                variant,
                why,
            )


def _tensor_parallel() -> tuple[int, int]:
    from vllm.distributed.parallel_state import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def _device(vllm_config: Any) -> torch.device:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _shape(vllm_config: Any) -> ModelShape:
    config: Mapping[str, Any] = vllm_config.model_config.hf_config.to_dict()
    return model_shape(config)


def _request(vllm_config: Any, shape: ModelShape, ranks: int, device: torch.device) -> Request:
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    drafts = vllm_config.speculative_config
    machine = machine_of(device)
    return Request(
        platform=machine.platform,
        arch=machine.arch,
        model=shape,
        num_heads=shape.num_attention_heads // ranks,
        limits=Limits(
            max_tokens=scheduler.max_num_batched_tokens,
            max_requests=scheduler.max_num_seqs,
            max_model_len=vllm_config.model_config.max_model_len,
            max_query_len=scheduler.max_num_batched_tokens,
        ),
        kv_cache_dtype=_kv_cache_dtype(vllm_config.cache_config.cache_dtype),
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        page_sizes=PageSizes(context=vllm_config.cache_config.block_size or 256),
        strided_pages=True,
        decode_query_len=1 + (drafts.num_speculative_tokens if drafts else 0),
        tensor_parallel=ranks,
        context_parallel=parallel.decode_context_parallel_size,
        graph=not vllm_config.model_config.enforce_eager,
        private_output=False,
        host_lengths=False,
        seam="kernel",
    )


def _kv_cache_dtype(asked: str) -> str:
    """vLLM rewrites what the user asked while it builds layers; `fp8_ds_mla` may already stand there."""
    return "bf16" if asked == "bfloat16" else asked


def _select(request: Request, asked: AdapterOptions) -> Selection:
    if asked.backend == "auto":
        if asked.options:
            raise ConfigError('additional_config["dsv4"]["options"] belong to a named backend; name it.')
        return select(request)
    return select(request, asked.backend, _options(asked))


def _options(asked: AdapterOptions) -> BackendOptions | None:
    record = discover().get(asked.backend)
    if record is None or not asked.options:
        return None  # selection says what is wrong with an absent backend
    kind = load_backend(record).info.options
    names = [own.name for own in fields(kind) if own.name != "name"]
    unknown = sorted(set(asked.options).difference(names))
    if unknown:
        raise ConfigError(
            f"backend={asked.backend} has no option {unknown[0]!r}; it takes {', '.join(names) or 'none'}."
        )
    return kind(name=asked.backend, **asked.options)


def _agreed(choose: Any) -> Selection:
    """The selection, if all ranks that share the heads made the same: a rank alone would hang the others."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    selection, verdict = None, ""
    try:
        selection = choose()
        summary = selection.summary()
    except DSV4Error as error:
        summary, verdict = {}, str(error)
    except Exception as error:  # a rank that leaves would let the others wait for ever
        summary, verdict = {}, f"Selecting a backend raised {one_line(error)}."
    found: list[tuple[str, dict[str, Any]]] = [("", {})] * group.world_size
    torch.distributed.all_gather_object(found, (verdict, summary), group=group.cpu_group)
    refusals = {rank: text for rank, (text, _) in enumerate(found) if text}
    if refusals:
        rank, text = next(iter(refusals.items()))
        raise ConfigError(text if len(refusals) == len(found) else f"Rank {rank} of {len(found)}: {text}")
    for rank, (_, other) in enumerate(found):
        if other != found[0][1]:
            raise ConfigError(
                f"Rank {rank} of {len(found)} selected {other}, and rank 0 selected {found[0][1]}; install "
                "the same packages everywhere."
            )
    assert selection is not None
    return selection
