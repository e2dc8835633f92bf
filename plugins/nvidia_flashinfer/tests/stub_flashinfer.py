"""FlashInfer's `trtllm_batch_decode_sparse_mla_dsv4` in plain torch, with what it documents and refuses.

Arguments and checks are those of TRTLLM-gen's path in 0.6.18, and the parameter of 0.7 by which indices count
rows of a pool's memory.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from stub_fa3 import BatchMLAPagedAttentionWrapper

WINDOW = 128
HEADS = (8, 16, 32, 64, 128)


def trtllm_batch_decode_sparse_mla_dsv4(
    query: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    sparse_indices: torch.Tensor | None = None,
    compressed_kv_cache: torch.Tensor | None = None,
    sparse_topk_lens: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    enable_pdl: bool | None = None,
    swa_topk_lens: None = None,
    extra_sparse_indices: None = None,
    extra_sparse_topk_lens: None = None,
    backend: str = "auto",
    sparse_indices_are_storage_offsets: bool = False,
) -> torch.Tensor:
    assert backend in ("auto", "trtllm-gen")
    assert sparse_indices is not None
    assert compressed_kv_cache is not None
    assert sparse_topk_lens is not None
    assert seq_lens is not None
    assert cum_seq_lens_q is not None
    assert max_q_len is not None
    tokens, heads, width = query.shape
    assert tokens > 0, "A table of nothing cannot be reshaped."
    assert max_q_len > 0
    assert heads in HEADS, f"{heads} heads, and kernels have {HEADS}."
    assert width == 512
    assert query.is_contiguous()
    assert isinstance(bmm1_scale, float)
    assert isinstance(bmm2_scale, float)
    assert workspace_buffer.dtype == torch.uint8
    assert out is not None
    assert out.shape == query.shape
    assert out.dtype == torch.bfloat16
    _check_table(sparse_indices, sparse_topk_lens, tokens)
    requests = len(cum_seq_lens_q) - 1
    for lengths, count in ((seq_lens, requests), (cum_seq_lens_q, requests + 1)):
        assert lengths.dtype == torch.int32
        assert lengths.shape == (count,)
    queries = cum_seq_lens_q.diff()
    assert int(cum_seq_lens_q[0]) == 0
    assert bool((seq_lens >= queries).all()), "The window cannot be derived."
    assert int(queries.max()) <= max_q_len
    if sinks is not None:
        assert sinks.dtype == torch.float32
        assert sinks.shape == (heads,)
    pools = [
        _rows(cache, query.dtype, kv_layout, sparse_indices_are_storage_offsets)
        for cache in (swa_kv_cache, compressed_kv_cache)
    ]
    for request in range(requests):
        begin, end = (int(own) for own in cum_seq_lens_q[request : request + 2])
        for token in range(begin, end):
            position = int(seq_lens[request]) - (end - token)
            slots = sparse_indices[token, : int(sparse_topk_lens[token])].long()
            window, others = slots[:WINDOW], slots[WINDOW:]
            window = window[: min(position + 1, WINDOW)]  # those that there are not are masked by the length
            assert bool((others >= 0).all()), "A column that counts names no row."
            rows = torch.cat([_named(pools[0], window), _named(pools[1], others)])
            out[token] = _attend(query[token].float(), rows, bmm1_scale, bmm2_scale, sinks)
    return out


def _check_table(table: torch.Tensor, lengths: torch.Tensor, tokens: int) -> None:
    assert table.dtype == lengths.dtype == torch.int32
    assert table.shape[0] == tokens
    assert table.shape[1] % 4 == 0, "Rows are loaded 16 bytes at a time."
    assert table.stride(1) == 1
    assert table.data_ptr() % 16 == 0
    assert lengths.shape == (tokens,)
    if tokens:
        assert int(lengths.min()) >= WINDOW, "All columns of the window count."
        assert int(lengths.max()) <= table.shape[1]


def _rows(cache: torch.Tensor, dtype: torch.dtype, layout: str, offsets: bool) -> torch.Tensor:
    """All rows of a pool's memory by number."""
    assert cache.dim() == 4
    assert cache.dtype == dtype, "Queries and rows have one dtype."
    pages, size, one, width = cache.shape
    assert layout == "NHD"
    assert (one, width) == (1, 512)
    assert cache.stride(1) == width
    span, rest = divmod(cache.stride(0), width)
    assert rest == 0
    assert span == size or offsets, "Dense pages are assumed."
    return cache.as_strided(((pages - 1) * span + size, width), (width, 1))


def _named(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    slots = slots[slots >= 0]
    assert bool((slots < len(rows)).all()), "A row is out of bounds."
    return rows[slots].float()


def _attend(
    q: torch.Tensor, rows: torch.Tensor, score: float, value: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    if not len(rows):
        return torch.zeros_like(q).bfloat16()
    scores = q @ rows.T * score
    total = scores.logsumexp(-1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks)
    return ((scores - total[:, None]).exp() @ rows * value).bfloat16()


def _without_offsets(**arguments: Any) -> torch.Tensor:
    """As in 0.6.18."""
    assert "sparse_indices_are_storage_offsets" not in arguments
    return trtllm_batch_decode_sparse_mla_dsv4(**arguments)


signature = inspect.signature(trtllm_batch_decode_sparse_mla_dsv4)
older = [own for name, own in signature.parameters.items() if not name.endswith("offsets")]
_without_offsets.__signature__ = signature.replace(parameters=older)  # type: ignore[attr-defined]
KERNELS = {"0.6.18": _without_offsets, "0.7.0": trtllm_batch_decode_sparse_mla_dsv4}


def modules(version: str = "0.7.0") -> dict[str, ModuleType]:
    """`flashinfer`, `flashinfer.mla`, and where it looks for its kernels."""
    names = ("flashinfer", "flashinfer.mla", "flashinfer.artifacts", "flashinfer.jit.env")
    package, mla, artifacts, env = map(ModuleType, names)
    vars(artifacts)["ArtifactPath"] = SimpleNamespace(TRTLLM_GEN_FMHA="2d6a5a/fmha/trtllm-gen/")
    vars(env)["FLASHINFER_CUBIN_DIR"] = "nowhere"
    vars(package)["mla"] = mla
    vars(mla)["trtllm_batch_decode_sparse_mla_dsv4"] = KERNELS[version]
    vars(mla)["BatchMLAPagedAttentionWrapper"] = BatchMLAPagedAttentionWrapper
    return dict(zip(names, (package, mla, artifacts, env), strict=True))
