"""Peers compute what a backend computes, on the same inputs; libraries that need a GPU are stood in for."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from dsv4core.api import Request
from dsv4core.bench.gaps import Unmeasurable
from dsv4core.bench.inputs import Inputs
from dsv4core.bench.operations import measured
from dsv4core.bench.peers import PEERS
from dsv4core.bench.workload import KINDS, Workload
from dsv4core.config import BENCH_VALUES
from dsv4core.framework.selection import select
from dsv4core.model.shapes import PRESETS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4core.bench.inputs.cache_bytes", lambda device: 1 << 17)


def inputs(workload: Workload, arch: str = "", dtype: str = "float32", rows: str = "bf16") -> Inputs:
    request = Request(
        "cuda" if arch else "cpu",
        arch,
        PRESETS["tiny"],
        16,
        workload.limits,
        dtype=dtype,
        kv_cache_dtype=rows,
    )
    return Inputs(select(request, "reference"), workload, CPU)


def assert_same(own: Inputs, peer: str, tolerance: float) -> None:
    mine, theirs = measured("forward_mqa", own), PEERS[peer]["forward_mqa"](own)
    assert len(mine.calls) == len(theirs.calls) >= 2
    for _ in range(2):  # what a peer keeps between calls must not depend on their order
        for call, other in zip(mine.calls, theirs.calls, strict=True):
            found, expected = other().float(), call().data.float()  # type: ignore[attr-defined]
            torch.testing.assert_close(found.reshape_as(expected), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("phase", BENCH_VALUES["phase"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_torch(phase: str, kind: str) -> None:
    assert_same(inputs(Workload(phase, KINDS[kind], 6, 700)), "torch", 1e-4)


class Wrapper:
    """FlashInfer 0.6.18's `BatchMLAPagedAttentionWrapper`: its arguments, and what they mean."""

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
        assert (use_cuda_graph, backend) == (True, "fa3")
        self.buffers = [qo_indptr, kv_indptr, kv_indices, kv_len_arr]

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
        assert (num_heads, head_dim_ckv, head_dim_kpe, page_size, causal) == (16, 512, 0, 1, False)
        assert q_data_type == kv_data_type == torch.bfloat16
        for buffer, given in zip(self.buffers, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True):
            assert given.dtype == torch.int32
            buffer[: len(given)].copy_(given)  # type: ignore[index]
        self.scale = sm_scale

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert return_lse
        assert return_lse_base_on_e
        assert ckv_cache.is_contiguous()
        assert (ckv_cache.shape[1:], kpe_cache.shape[1:], q_pe.shape[1:]) == ((1, 512), (1, 0), (16, 0))
        found = []
        _, starts, numbers, counts = self.buffers
        for query, start, count in zip(q_nope, starts.tolist(), counts.tolist(), strict=False):  # type: ignore[union-attr]
            rows = ckv_cache[numbers[start : start + count].long(), 0].float()  # type: ignore[index]
            scores = query.float() @ rows.T * self.scale
            found.append((scores.softmax(-1) @ rows, scores.logsumexp(-1)))
        outs, sums = zip(*found, strict=True)
        return torch.stack(outs).to(q_nope.dtype), torch.stack(sums)


def sparse_decode(
    query: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    sparse_indices: torch.Tensor,
    compressed_kv_cache: torch.Tensor,
    sparse_topk_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
) -> torch.Tensor:
    """FlashInfer 0.6.18's `trtllm_batch_decode_sparse_mla_dsv4`, as TRTLLM-gen reads its arguments."""
    assert sparse_indices.dtype == sparse_topk_lens.dtype == seq_lens.dtype == torch.int32
    assert sparse_indices.shape[1] % 4 == 0
    assert sinks is not None
    window, compressed = (pool.flatten(0, 1).float() for pool in (swa_kv_cache, compressed_kv_cache))
    found = []
    for q, row, length in zip(query[:, 0].float(), sparse_indices.long(), sparse_topk_lens, strict=True):
        rows = torch.cat([window[row[:128]], compressed[row[128 : int(length)]]])
        scores = torch.cat([q @ rows.T * bmm1_scale, sinks[:, None]], dim=-1)
        found.append(scores.softmax(-1)[:, :-1] @ rows * bmm2_scale)
    return torch.stack(found).to(query.dtype)[:, None]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("flashinfer.mla")
    module.BatchMLAPagedAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    module.trtllm_batch_decode_sparse_mla_dsv4 = sparse_decode  # type: ignore[attr-defined]
    monkeypatch.setattr("dsv4core.bench.peers.flashinfer.WORKSPACE", 16)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    return module


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("rows", ["bf16", "fp8"])
@pytest.mark.parametrize("phase", BENCH_VALUES["phase"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_flashinfer_on_hopper(kind: str, phase: str, rows: str) -> None:
    own = inputs(Workload(phase, KINDS[kind], 6, 700), "sm_90", "bfloat16", rows)
    assert_same(own, "flashinfer", 2e-2)
    assert PEERS["flashinfer"]["forward_mqa"](own).layout.window.name == "bf16", (
        "what it reads, not what it got"
    )


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", list(KINDS))
def test_flashinfer_on_blackwell(kind: str) -> None:
    assert_same(inputs(Workload("decode", KINDS[kind], 6, 700), "sm_100", "bfloat16"), "flashinfer", 2e-2)


def refusal(peer: str, operation: str, own: Inputs) -> str:
    with pytest.raises(Unmeasurable) as caught:
        PEERS[peer][operation](own)
    return str(caught.value)


def test_where_a_peer_does_not_fit(library: Any) -> None:
    decode, prompt = Workload("decode", KINDS["c4a"], 2, 700), Workload("prefill", KINDS["c4a"], 2, 700)
    assert refusal("flashinfer", "forward_mqa", inputs(decode, "sm_120", "bfloat16")) == (
        "FlashInfer has kernels for plain rows of DeepSeek-V4 on sm_90, sm_100, sm_103, and this is sm_120; "
        "leave the peer out here."
    )
    assert refusal("flashinfer", "forward_mqa", inputs(decode, "sm_90")) == (
        "FlashInfer is called with bf16 queries; set dtype=bfloat16."
    )
    assert "and this is prefill c4a, 2 tokens, context 700; set bench.phase=[decode]" in refusal(
        "flashinfer", "forward_mqa", inputs(prompt, "sm_100", "bfloat16")
    )
    library.trtllm_batch_decode_sparse_mla_dsv4 = lambda query: query
    assert refusal("flashinfer", "forward_mqa", inputs(decode, "sm_100", "bfloat16")) == (
        "The installed FlashInfer takes other arguments (got an unexpected keyword argument 'swa_kv_cache'); "
        "install version 0.6.18."
    )
    assert refusal("flashmla", "forward_mqa", inputs(decode)) == (
        "FlashMLA decodes up to 128 heads on fp8_ds_mla rows, and this is decode of 16 heads on bf16 rows; "
        "set bench.phase=[decode] and kv_cache_dtype=fp8_ds_mla."
    )
    assert "and this is prefill on pages of 64; set bench.phase=[decode]" in refusal(
        "deepgemm", "indexer", inputs(prompt)
    )
    assert refusal("deepgemm", "indexer", inputs(Workload("decode", KINDS["swa"], 2, 700))) == (
        "swa layers have no indexer; measure another kind."
    )
    assert refusal("transformers", "layer", inputs(Workload("mixed", KINDS["swa"], 4, 700))) == (
        "transformers' batches have one number of query tokens; leave out the phase mixed."
    )


@pytest.mark.parametrize("kind", list(KINDS))
def test_transformers(kind: str) -> None:
    """A prompt from its first token, so that both have the same past: none. It is short of the top-k."""
    pytest.importorskip("transformers", minversion="5.17", reason="the peer is not installed")
    own = inputs(Workload("prefill", KINDS[kind], 200, 1), rows="fp32")
    mine, theirs = measured("layer", own), PEERS["transformers"]["layer"](own)
    assert (theirs.layout.window.name, theirs.captured) == ("fp32", False)
    for _ in range(2):
        for call, other in zip(mine.calls, theirs.calls, strict=True):
            expected, found = call()[0], other()[0]  # type: ignore[index]
            assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", list(KINDS))
def test_transformers_decodes_the_same_step_again_and_again(kind: str) -> None:
    pytest.importorskip("transformers", minversion="5.17", reason="the peer is not installed")
    theirs = PEERS["transformers"]["layer"](inputs(Workload("decode", KINDS[kind], 3, 701), dtype="bfloat16"))
    first = [call() for call in theirs.calls]
    assert first[0].shape == (3, 1, 256)  # type: ignore[attr-defined]
    assert first[0].isfinite().all()  # type: ignore[attr-defined]
    for before, call in zip(first, theirs.calls, strict=True):
        torch.testing.assert_close(call(), before, atol=0, rtol=0)
