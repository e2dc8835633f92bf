"""FlashInfer's MLA wrapper in plain torch, as `backend="fa3"` and pages of one row, with what it refuses.

Rows are read where their numbers point to, from the address of the tensor of rows on, as the kernel does.
"""

from __future__ import annotations

import ctypes

import torch


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert backend == "fa3"
        assert not use_cuda_graph
        assert float_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        assert (head_dim_ckv, head_dim_kpe, page_size, causal) == (512, 0, 1, False)
        assert q_data_type == torch.bfloat16
        assert kv_data_type in (torch.bfloat16, torch.float8_e4m3fn)
        queries = len(kv_len_arr)
        assert 0 < queries <= 8192
        for lengths, count in ((qo_indptr, queries + 1), (kv_indptr, queries + 1), (kv_len_arr, queries)):
            assert lengths.dtype == torch.int32
            assert lengths.device.type == "cpu", "Lengths on the GPU make the host wait."
            assert lengths.shape == (count,)
        assert bool((qo_indptr.diff() == 1).all())
        assert bool((kv_indptr[:-1] + kv_len_arr <= kv_indptr[1:]).all()), "Lists overlap."
        assert kv_indices.dtype == torch.int32
        assert int(kv_indptr[-1]) <= len(kv_indices)
        self._begin, self._count = kv_indptr.tolist(), kv_len_arr.tolist()
        self._kv_indices_buf = kv_indices
        self._heads, self._sm_scale, self._kv_data_type = num_heads, sm_scale, kv_data_type

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = len(self._count)
        assert len(q_nope) >= tokens, "A graph may have room for more queries than are planned."
        assert q_nope.shape[1:] == (self._heads, 512)
        assert q_nope.dtype == q_pe.dtype == torch.bfloat16
        assert q_pe.shape == (len(q_nope), self._heads, 0)
        assert q_nope.stride(2) == 1
        assert ckv_cache.dtype == kpe_cache.dtype == self._kv_data_type
        assert ckv_cache.shape[1:] == (1, 512)
        assert kpe_cache.shape[1:] == (1, 0)
        assert ckv_cache.stride(0) * ckv_cache.element_size() % 16 == 0, "Rows are loaded 16 bytes at a time."
        assert ckv_cache.data_ptr() % 16 == 0
        assert (ckv_scale is None) == (kpe_scale is None) == (self._kv_data_type == torch.bfloat16)
        assert ckv_scale in (None, 1.0), "It is rounded to bf16."
        assert return_lse
        assert return_lse_base_on_e
        assert out is not None
        assert lse is not None
        assert out.shape == q_nope.shape
        assert out.dtype == torch.bfloat16
        assert lse.shape == q_nope.shape[:2]
        assert lse.dtype == torch.float32
        for token, (begin, count) in enumerate(zip(self._begin, self._count, strict=False)):
            rows = _rows(ckv_cache, self._kv_indices_buf[begin : begin + count].tolist())
            scores = q_nope[token].float() @ rows.T * self._sm_scale
            lse[token] = scores.logsumexp(-1)
            out[token] = (scores - lse[token][:, None]).exp().bfloat16().float() @ rows if count else 0.0
        return out, lse


def _rows(first: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """Rows by number, `[rows, 512]` fp32."""
    size = first.element_size()
    stride, base = first.stride(0) * size, first.data_ptr()
    data = b"".join(ctypes.string_at(base + number * stride, 512 * size) for number in numbers)
    if not data:
        return torch.zeros(0, 512)
    return torch.frombuffer(bytearray(data), dtype=first.dtype).view(-1, 512).float()
