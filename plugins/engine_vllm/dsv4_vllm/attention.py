"""The attention class: vLLM's own for the platform, with the attention itself done by a backend."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_vllm import drift
from dsv4_vllm.host import Host
from dsv4_vllm.steps import cache_of, step_of
from dsv4core.api import LayerCaches
from dsv4core.framework.binding import BoundLayer
from dsv4core.model.rope import rotate_back

_hosts: dict[int, tuple[Any, Host, dict[type, type]]] = {}


def attention_class(base: type, vllm_config: Any, touched: tuple[drift.Touched, ...]) -> type:
    """A subclass of vLLM's attention class of this platform, for one configuration.

    Args:
        base: vLLM's class.
        vllm_config: vLLM's configuration.
        touched: What has to be there of vLLM.

    Raises:
        DSV4Error: The configuration is wrong, or the asked backend cannot run.
    """
    if id(vllm_config) not in _hosts:
        # The configuration is kept, so that its id stays its own.
        _hosts[id(vllm_config)] = (vllm_config, Host(vllm_config, base, touched), {})
    _, host, classes = _hosts[id(vllm_config)]
    if base not in classes:
        classes[base] = _derive(base, host)
    return classes[base]


def _derive(base: Any, host: Host) -> type:
    from vllm.forward_context import get_forward_context

    class DSV4CoreAttention(base):
        """vLLM keeps insert, compressor, indexer and output projection; attention is dsv4core's."""

        _dsv4_host = host
        _bound: BoundLayer | None = None
        _lent: tuple[tuple[torch.Tensor, ...], LayerCaches] | None = None

        @classmethod
        def get_padded_num_q_heads(cls, num_heads: int) -> int:
            return host.choice.padded_heads

        def forward_mqa(
            self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor
        ) -> None:
            layer = self._bind()
            context = get_forward_context()
            metadata = context.attn_metadata
            if metadata is None:  # vLLM measures memory: what a step will take has to be taken now
                host.reserve(layer.spec.kind)
                torch.empty(layer.plan.workspace_bytes, dtype=torch.uint8, device=q.device)
                output.zero_()
                return
            host.report_weights()
            window, main = metadata[self.swa_cache_layer.prefix], metadata.get(self.prefix)
            step, kind = step_of(host, layer.spec.kind, window, main, positions, context)
            tokens, heads = step.num_tokens, layer.spec.num_heads
            selected = self.topk_indices_buffer[:tokens] if layer.spec.kind.select == "top_k" else None
            out = output[:tokens]
            result = layer.forward_mqa(
                q[:tokens], self._caches(), selected, step.positions, step, kind.state, out, False, True
            )
            if result.data.data_ptr() != out.data_ptr():
                out[:, :heads].copy_(result.data[:, :heads])
            if getattr(self, drift.ROTATES_BACK, True) is None:
                rotated = rotate_back(out[:, :heads].float(), step.positions, self._rope)
                out[:, :heads].copy_(rotated)

        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            """Prepare the backend's weights when vLLM prepares its own: again when it has loaded others."""
            prepare = getattr(super(), "process_weights_after_loading", None)  # the CPU's class has one
            if prepare is not None:
                prepare(act_dtype)
            self._bound = None
            self._bind()

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            """Check vLLM's pages as soon as their size is settled, not at the first request."""
            spec = super().get_kv_cache_spec(vllm_config)
            if spec is not None:
                host.check_context_pages(spec.block_size)
            return spec

        def _bind(self) -> BoundLayer:
            if self._bound is None:
                from vllm.model_executor.models.utils import extract_layer_index

                drift.check_layer(self)
                self._rope = host.rope(self.rotary_emb.cos_sin_cache)
                index = extract_layer_index(self.prefix)
                self._bound = host.bind(index, self.attn_sink.data, self._rope)
            return self._bound

        def _caches(self) -> LayerCaches:
            """Views of vLLM's caches, made anew only where vLLM has bound others."""
            window, compressed = self.swa_cache_layer.kv_cache, self.kv_cache
            if self._lent is None or self._lent[0][0] is not window or self._lent[0][1] is not compressed:
                self._lent = ((window, compressed), self._lend(window, compressed))
            return self._lent[1]

        def _lend(self, window: torch.Tensor, compressed: torch.Tensor) -> LayerCaches:
            layout = host.selection.layout
            if self.compressor is None:
                return LayerCaches(cache_of(window, layout.window))
            return LayerCaches(cache_of(window, layout.window), cache_of(compressed, layout.compressed))

    DSV4CoreAttention.__qualname__ = f"DSV4Core[{base.__name__}]"
    return DSV4CoreAttention
