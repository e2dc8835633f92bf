"""An AITER in plain torch, made from the plugin's data: what the real one computes, refuses and gets wrong.

Modules and signatures are those of `symbols.json` and `signatures.json`, in a version. Where a real kernel
reads out of bounds, this fails; where it leaves memory as it was, or divides by zero, this gives NaN.
"""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from dsv4_plugin_rocm_aiter import library, routes

from dsv4core.testing.signatures import Recorded
from dsv4core.testing.subject import Subject

NOPE, ROPE, TILE, DATA, RECORD, WIDTH = 448, 64, 64, 576, 584, 512
ON_AMD = torch.version.hip is not None and torch.cuda.is_available()
"""Whether the real AITER is tested, and not this."""
VERSIONS = {"amd-aiter": "0.1.20.post1", "flydsl": "0.3.1", "triton": "3.7.0"}
"""What is installed beside the stub, unless a test says otherwise."""
Install = Callable[..., Subject]
"""Imports a stub, by chip and version, and gives the backend on it: the fixture `install`."""
Calls = Counter[str]
"""How often each function is called: the fixture `called`."""
RECORDED = {
    entry["target"]: Recorded(**entry)
    for entry in json.loads(Path(routes.__file__).with_name("signatures.json").read_text())
}


def modules(arch: str, version: str) -> dict[str, ModuleType]:
    """The modules of an AITER for a chip, by name; symbols of other versions are not there."""
    own, made = Stub(arch), {"aiter": ModuleType("aiter")}
    for target in dict.fromkeys(symbol.target for symbol in routes.symbols()):
        known = [
            symbol
            for symbol in routes.symbols()
            if symbol.target == target and library.fits(version, symbol.since, symbol.before)
        ]
        if not known:
            continue
        folder, _, name = target.rpartition(".")
        parts = folder.split(".")
        for count in range(1, len(parts) + 1):
            module = made.setdefault(".".join(parts[:count]), ModuleType(parts[count - 1]))
            module.__path__ = []  # type: ignore[attr-defined]
        setattr(made[folder], name, stubbed(own, target, known))
    return made


def stubbed(own: Stub, target: str, known: Sequence[routes.Symbol]) -> Any:
    """A function with the recorded signature, or with the parameters that are called."""
    name = target.rpartition(".")[2]
    compute = getattr(own, name, None)
    names = [parameter for symbol in known for parameter in symbol.parameters]
    if name.endswith("_kernel"):
        return Kernel(tuple(dict.fromkeys(names)), compute)
    if target in RECORDED:
        signature = RECORDED[target].parsed
        signature = signature.replace(
            parameters=[
                p.replace(default=None if p.default is ... else p.default)
                for p in signature.parameters.values()
            ]
        )
    else:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(own, kind) for own in dict.fromkeys(names)])

    def function(*args: Any, **kwargs: Any) -> Any:
        assert compute is not None, f"{name} is called, and no route takes it."
        return compute(**signature.bind(*args, **kwargs).arguments)

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Kernel:
    """A kernel of Triton: launched with a grid, which its tuning makes."""

    arg_names: tuple[str, ...]
    compute: Callable[..., None] | None

    def __getitem__(self, grid: Callable[[dict[str, int]], tuple[int, ...]]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            assert self.compute is not None
            values = dict(zip(self.arg_names, args, strict=False)) | kwargs
            assert values.keys() == set(self.arg_names)
            self.compute(grid({"BLOCK_H": 32}), **values)

        return launch


@dataclass(frozen=True)
class Stub:
    """What AITER's functions do on one chip."""

    arch: str

    def pa_decode_sparse(
        self,
        q: torch.Tensor,
        unified_kv: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        attn_sink: torch.Tensor,
        softmax_scale: float,
        kv_splits: int,
        has_invalid: bool,
        extra_cache: torch.Tensor | None = None,
        extra_indices: torch.Tensor | None = None,
        extra_indptr: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_queries(q)
        check_sinks(attn_sink, q.shape[1])
        assert kv_splits >= 1
        assert kv_splits & (kv_splits - 1) == 0, "The reduction has a range of a power of two."
        pools = [(unified_kv, kv_indices, kv_indptr)]
        if self.arch == "gfx950":
            if extra_cache is not None:
                assert extra_indices is not None
                assert extra_indptr is not None
                pools.append((extra_cache, extra_indices, extra_indptr))
            return self._gluon(q, pools, attn_sink, softmax_scale, has_invalid)
        assert extra_cache is None, "extra_cache/extra_indices/extra_indptr are gfx950 packed-only"
        assert unified_kv.dim() == 2
        assert unified_kv.dtype == q.dtype, "Triton's kernel has rows of the queries' dtype."
        assert unified_kv.stride() == (WIDTH, 1)
        out = torch.empty_like(q)
        for token, own in enumerate(lists(kv_indices, kv_indptr, len(q))):
            # One part: the program returns at once, and writes nothing. Several: the reduction divides by 0.
            out[token] = math.nan
            if len(own) and (kv_splits > 1 or bool(attn_sink.isfinite().all())):
                assert has_invalid or bool((own >= 0).all())
                rows = unified_kv[checked(own[own >= 0], len(unified_kv))]
                out[token] = attended(q[token], rows, attn_sink, softmax_scale)
        return out

    def _gluon(
        self,
        q: torch.Tensor,
        pools: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        sinks: torch.Tensor,
        scale: float,
        has_invalid: bool,
    ) -> torch.Tensor:
        for cache, _, _ in pools:
            check_blocks(cache, q.dtype)
        out = torch.empty_like(q)
        named = [lists(indices, starts, len(q)) for _, indices, starts in pools]
        for token, own in enumerate(zip(*named, strict=True)):
            rows, alone = [], False
            for (cache, _, _), slots in zip(pools, own, strict=True):
                assert has_invalid or bool((slots >= 0).all()), "A sentinel is read as a row."
                alone |= bool(len(slots)) and bool((slots < 0).all())
                rows.append(read_blocks(cache, slots[slots >= 0]))
            every = torch.cat(rows)
            out[token] = attended(q[token], every, sinks, scale)
            if not len(every) and (alone or not bool(sinks.isfinite().all())):
                out[token] = math.nan  # the largest score is taken for 0, or is subtracted from itself
        return out

    def pa_prefill_sparse(self, q: torch.Tensor, attn_sink: torch.Tensor | None, **_: Any) -> torch.Tensor:
        """As far as AITER 0.1.20's branch of other chips gets."""
        attn_sink = attn_sink or torch.empty(1)
        raise AssertionError("It invents a sink, and reads one for each head.")

    def pa_sparse_prefill_opus(
        self,
        q: torch.Tensor,
        unified_kv: torch.Tensor,
        kv_indices_prefix: torch.Tensor,
        kv_indptr_prefix: torch.Tensor,
        kv: torch.Tensor,
        kv_indices_extend: torch.Tensor,
        kv_indptr_extend: torch.Tensor,
        attn_sink: torch.Tensor,
        softmax_scale: float,
    ) -> torch.Tensor:
        if self.arch != "gfx950":
            raise RuntimeError(f"pa_sparse_prefill_opus requires gfx950, got {self.arch}")
        check_queries(q)
        check_sinks(attn_sink, q.shape[1])
        sources = [
            (unified_kv, kv_indices_prefix, kv_indptr_prefix),
            (kv, kv_indices_extend, kv_indptr_extend),
        ]
        assert unified_kv.stride(0) == kv.stride(0)
        out = torch.empty_like(q)
        named = [lists(indices, starts, len(q)) for _, indices, starts in sources]
        for token, own in enumerate(zip(*named, strict=True)):
            parts = []
            for (rows, _, _), slots in zip(sources, own, strict=True):
                check_rows(rows, q.dtype)
                parts.append(rows[checked(slots, len(rows))])
            out[token] = attended(q[token], torch.cat(parts), attn_sink, softmax_scale)
        return out

    def _sparse_attn_prefill_kernel(self, grid: tuple[int, int], **own: Any) -> None:
        q, out, sinks = own["q_ptr"], own["out_ptr"], own["attn_sink_ptr"]
        assert grid == (len(q), -(-q.shape[1] // 32))
        assert own["HAS_ATTN_SINK"] is True
        strides = [own[f"{name}_stride_{axis}"] for name in ("q", "out") for axis in "thd"]
        assert strides == [*q.stride(), *out.stride()]
        assert (own["kv_stride_n"], own["kv_stride_d"]) == own["kv_ptr"].stride()
        sizes = [own[name] for name in ("num_heads", "head_dim", "num_kv", "BLOCK_D")]
        assert sizes == [q.shape[1], WIDTH, len(own["kv_ptr"]), WIDTH]
        self._ragged(q, own["kv_ptr"], own["kv_indices_ptr"], own["kv_indptr_ptr"], own["scale"], sinks, out)

    def sparse_attn_prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        topk_length: torch.Tensor | None,
        scale: float,
        head_dim: int,
        nope_head_dim: int,
        rope_head_dim: int,
        attn_sink: torch.Tensor,
        output: torch.Tensor,
        ragged_indices: torch.Tensor,
        ragged_indptr: torch.Tensor,
    ) -> None:
        assert (head_dim, nope_head_dim, rope_head_dim) == (WIDTH, NOPE, ROPE)
        assert kv.dim() == 3
        assert kv.shape[1] == 1
        self._ragged(q, kv[:, 0], ragged_indices, ragged_indptr, scale, attn_sink, output)

    def _ragged(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        indices: torch.Tensor,
        starts: torch.Tensor,
        scale: float,
        sinks: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        check_queries(q)
        check_sinks(sinks, q.shape[1])
        check_rows(rows, q.dtype)
        for token, own in enumerate(lists(indices, starts, len(q))):
            out[token] = attended(q[token], rows[checked(own[own >= 0], len(rows))], sinks, scale)

    def fp8_mqa_logits(
        self,
        Q: torch.Tensor,
        KV: torch.Tensor,
        kv_scales: torch.Tensor,
        weights: torch.Tensor,
        cu_starts: torch.Tensor,
        cu_ends: torch.Tensor,
        clean_logits: bool,
    ) -> torch.Tensor:
        tokens, heads, width = Q.shape
        assert heads & (heads - 1) == 0
        assert width & (width - 1) == 0
        assert KV.shape == (len(kv_scales), width)
        assert weights.shape == (tokens, heads)
        assert weights.dtype == kv_scales.dtype == torch.float32
        assert cu_starts.dtype == cu_ends.dtype == torch.int32
        assert int(cu_ends.max()) <= len(KV)
        q, keys, factor = Q, KV, 1.0
        if self.arch == "gfx942":  # whose matrix units read FNUZ: half the value, in the same code
            q, keys = ((own.float() / 2).to(torch.float8_e4m3fnuz) for own in (Q, KV))
            factor = 4.0
        products = torch.einsum("thd,kd->tkh", q.float(), keys.float()).relu()
        scores = torch.einsum("tkh,th->tk", products, weights) * (kv_scales * factor)
        column = torch.arange(len(KV))
        seen = (column >= cu_starts[:, None]) & (column < cu_ends[:, None])
        padded = torch.full((tokens, -(-len(KV) // 256) * 256), -math.inf if clean_logits else math.nan)
        padded[:, : len(KV)] = torch.where(seen, scores, padded[:, : len(KV)])
        return padded[:, : len(KV)]

    def top_k_per_row_prefill(
        self,
        logits: torch.Tensor,
        rowStarts: torch.Tensor,
        rowEnds: torch.Tensor,
        indices: torch.Tensor,
        values: None,
        numRows: int,
        stride0: int,
        stride1: int,
        k: int,
        stable: bool,
    ) -> None:
        """Ranked by bits: NaN above everything, minus infinity below, and nothing is left out."""
        assert logits.dtype == torch.float32
        assert (numRows, stride0, stride1) == (len(logits), *logits.stride())
        assert rowStarts.dtype == rowEnds.dtype == indices.dtype == torch.int32
        assert indices.shape == (numRows, k)
        assert indices.is_contiguous()
        assert stable, "Ties go to anybody, in any order."
        for row, (begin, end) in enumerate(zip(rowStarts.tolist(), rowEnds.tolist(), strict=True)):
            assert 0 <= begin <= end <= logits.shape[1]
            bits = logits[row, begin:end].contiguous().view(torch.int32).long()
            ranks = torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
            best = ranks.sort(descending=True, stable=True).indices[:k].sort().values
            indices[row] = -1
            indices[row, : len(best)] = (best + begin).int()

    def inverse_rope_group_quant(
        self,
        o: torch.Tensor,
        positions: torch.Tensor,
        cos_cache: torch.Tensor,
        sin_cache: torch.Tensor,
        num_groups: int,
        quant_group_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _, width = o.shape
        assert (width, cos_cache.shape[1]) == (WIDTH, ROPE // 2)
        assert o.dtype in (torch.bfloat16, torch.float16)
        assert cos_cache.dtype == sin_cache.dtype == o.dtype, "cos/sin dtype must match o"
        assert positions.dtype == torch.int64
        assert all(own.is_contiguous() for own in (o, positions, cos_cache, sin_cache))
        cos, sin = (own[positions].float()[:, None] for own in (cos_cache, sin_cache))
        values = o.float().clone()
        even, odd = o[..., NOPE::2].float(), o[..., NOPE + 1 :: 2].float()
        values[..., NOPE::2], values[..., NOPE + 1 :: 2] = even * cos + odd * sin, odd * cos - even * sin
        blocks = values.view(tokens, num_groups, -1, quant_group_size)
        largest, dtype = (
            (448.0, torch.float8_e4m3fn) if self.arch == "gfx950" else (240.0, torch.float8_e4m3fnuz)
        )
        exponent = (blocks.abs().amax(-1).clamp_min(1e-10) / largest).log2().ceil()
        codes = (blocks / exponent.exp2()[..., None]).to(dtype)
        return codes.flatten(2), (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)

    def batched_gemm_a8w8_mxscale(
        self,
        x: torch.Tensor,
        wo_a: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        assert self.arch == "gfx950", "OPUS has it for gfx950."
        tokens, groups, columns = x.shape
        assert x.dtype == wo_a.dtype == torch.float8_e4m3fn
        assert wo_a.shape == (groups, wo_a.shape[1], columns)
        assert wo_a.is_contiguous()
        assert x_scale.shape == (tokens, groups, columns // 128)
        assert w_scale.shape == (groups, wo_a.shape[1] // 128, columns // 128)
        assert w_scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
        rows = x.float() * powers(x_scale).repeat_interleave(128, 2)
        weight = wo_a.float() * powers(w_scale).repeat_interleave(128, 1).repeat_interleave(128, 2)
        return torch.einsum("tgc,grc->tgr", rows, weight).to(dtype)


def powers(scale: torch.Tensor) -> torch.Tensor:
    return (scale.view(torch.uint8).float() - 127).exp2()


def check_queries(q: torch.Tensor) -> None:
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.dim() == 3
    assert q.shape[2] == WIDTH
    assert q.stride(2) == 1
    assert len(q), "A grid of nothing cannot be launched."


def check_sinks(sinks: torch.Tensor, heads: int) -> None:
    assert sinks.dtype == torch.float32
    assert sinks.shape == (heads,)
    assert sinks.is_contiguous()


def check_rows(rows: torch.Tensor, dtype: torch.dtype) -> None:
    assert rows.dtype == dtype
    assert rows.dim() == 2
    assert rows.shape[1] == WIDTH
    assert rows.stride(1) == 1


def check_blocks(cache: torch.Tensor, dtype: torch.dtype) -> None:
    """Packed pages, or pages of plain rows; they may be apart."""
    assert cache.dim() == 3
    assert cache.dtype in (torch.uint8, dtype)
    assert cache.stride()[1:] == (cache.shape[2], 1)
    assert cache.shape[2] == (RECORD if cache.dtype == torch.uint8 else WIDTH)
    assert cache.stride(0) % 2 == 0, "Rotary dimensions are read as bf16."


def lists(indices: torch.Tensor, starts: torch.Tensor, tokens: int) -> list[torch.Tensor]:
    """Each query's list; starts are a sum, and within the buffer."""
    assert indices.dtype == starts.dtype == torch.int32
    assert indices.is_contiguous()
    assert starts.is_contiguous()
    assert starts.shape == (tokens + 1,)
    bounds = starts.tolist()
    assert bounds == sorted(bounds)
    assert bounds[0] >= 0
    assert bounds[-1] <= len(indices)
    return [indices[begin:end].long() for begin, end in pairwise(bounds)]


def checked(slots: torch.Tensor, count: int) -> torch.Tensor:
    assert bool(((slots >= 0) & (slots < count)).all()), "A row is out of bounds."
    return slots


def read_blocks(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`[n, 512]` of pages, whose packed codes are OCP's."""
    pages, size = cache.shape[:2]
    checked(slots, pages * size)
    page, row = slots // size, slots % size
    if cache.dtype != torch.uint8:
        return cache[page, row]
    flat = cache.as_strided((pages, cache.stride(0)), (cache.stride(0), 1))
    data = flat[page[:, None], row[:, None] * DATA + torch.arange(DATA)]
    scale = flat[page[:, None], size * DATA + row[:, None] * 8 + torch.arange(NOPE // TILE)]
    codes = data[:, :NOPE].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, TILE))
    values = (codes * powers(scale)[..., None]).flatten(1)
    return torch.cat([values, data[:, NOPE:].contiguous().view(torch.bfloat16).float()], 1).bfloat16()


def attended(q: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor, scale: float) -> torch.Tensor:
    """`[heads, 512]`: keys are values, and a sink is one more score, without a value."""
    scores = torch.cat([q.float() @ rows.float().T * scale, sinks[:, None]], 1)
    return (scores.softmax(1)[:, :-1] @ rows.float()).to(q.dtype)
