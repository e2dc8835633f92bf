"""What all attention layers of one vLLM worker share: its choice of a backend, and states of steps."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from typing import Any

import torch

from dsv4_vllm.choice import choose
from dsv4_vllm.drift import Touched
from dsv4core.api import ConfigError, DSV4Error, LayerKind, LayerSpec, LayerWeights, Weight
from dsv4core.framework.binding import BoundKind, BoundLayer, bind_kind, bind_layer
from dsv4core.model.shapes import layer_spec

logger = logging.getLogger("vllm.dsv4")

RESERVED: tuple[int, ...] = ()
"""Stands for block tables that are not known yet."""


class Host:
    """One worker. It is made with the first layer, and all layers bind through it."""

    def __init__(self, vllm_config: Any, base: Any, touched: tuple[Touched, ...]) -> None:
        self.choice = choose(vllm_config, base, touched)
        self.request, self.selection = self.choice.request, self.choice.selection
        self._rope: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._bound: list[BoundLayer] = []
        self._kinds: dict[str, dict[tuple[int, ...], BoundKind]] = defaultdict(dict)
        self._log()

    def spec(self, index: int) -> LayerSpec:
        """Layer `index` on this rank."""
        return layer_spec(self.choice.shape, index, self.choice.rank, self.request.tensor_parallel)

    def rope(self, table: torch.Tensor) -> torch.Tensor:
        """A table of cosines and sines in fp32. Layers share vLLM's tables, and so they do its copies."""
        if table.data_ptr() not in self._rope:
            self._rope[table.data_ptr()] = (
                table,
                table.float(),
            )  # the table, so that its address stays its own
        return self._rope[table.data_ptr()][1]

    def bind(self, index: int, sink: torch.Tensor, rope: torch.Tensor) -> BoundLayer:
        """Build the state of layer `index`; vLLM keeps all weights but these.

        Args:
            index: Layer number.
            sink: `[padded heads]` fp32, this rank's.
            rope: `[positions, rope_dim]` fp32, as `rope` gives it.
        """
        spec = self.spec(index)
        weights = LayerWeights({"attn_sink": Weight(sink[: spec.num_heads])}, rope)
        self._bound.append(bind_layer(self.selection, spec, weights, self.choice.device))
        return self._bound[-1]

    def reserve(self, kind: LayerKind) -> None:
        """Make the state of a layer kind before its tables are known: vLLM's memory profile has to see it."""
        if not self._kinds[kind.name]:
            self._kinds[kind.name][RESERVED] = bind_kind(self.selection, kind, self.choice.device)

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
            if len(bound.keys() - {RESERVED}) >= self.choice.shape.num_hidden_layers:
                raise DSV4Error(
                    f"vLLM's block tables for layers of kind {kind.name} move between steps, and a "
                    "backend's state is made for tables that stay; this version of vLLM is not served."
                )
            self.reserve(kind)
            reserved = bound.pop(RESERVED, None)
            bound[tables] = reserved or bind_kind(self.selection, kind, self.choice.device)
        return bound[tables]

    def check_context_pages(self, tokens: int) -> None:
        """Check that a page of entries is what the backend was asked about.

        Raises:
            ConfigError: It is not; vLLM settles its size after it has made the layers.
        """
        if tokens != (asked := self.request.page_sizes.context):
            raise ConfigError(
                f"vLLM's pages stand for {tokens} tokens, and the backend was asked about {asked}; set "
                f"block_size={asked}."
            )

    def check_window_pages(self, rows: int) -> None:
        """Check that a window page is what the backend was asked about.

        Raises:
            DSV4Error: It is not.
        """
        if rows != (asked := self.request.page_sizes.window):
            raise DSV4Error(
                f"vLLM's window pages have {rows} rows, and the backend was asked about {asked}; this "
                "version of vLLM is not served."
            )

    def report_weights(self) -> None:
        """Log, at the first step, what the backend keeps of weights besides vLLM's own."""
        if self._bound:
            sizes = [layer.describe().get("prepared_bytes") for layer in self._bound]
            known = sum(size for size in sizes if size is not None)
            prepared = "not told" if None in sizes else f"{known:,} bytes"
            logger.info(
                "dsv4: layers built: %d; weights that the backend prepared: %s.", len(sizes), prepared
            )
            self._bound = []

    def _log(self) -> None:
        chosen = self.selection
        why = "as asked" if chosen.asked != "auto" else "the first of auto's order that can run"
        for name, count in Counter(kind.name for kind in self.choice.shape.layer_kinds).items():
            logger.info(
                "dsv4: %d %s of kind %s on %s (%s), variant %s: %s.",
                count,
                "layer" if count == 1 else "layers",
                name,
                chosen.backend.name,
                chosen.backend.record.source,
                chosen.plans[name].variant or "default",
                why,
            )
