"""L3: attention at the kernel seam against the definition, on the same cached bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4core.api import C4A, C128A, SWA, LayerKind, LayerScales, Limits, PageSizes
from dsv4core.testing.case import HUGE, NAN, Case
from dsv4core.testing.compare import assert_attention, assert_lse, assert_same, snapshot
from dsv4core.testing.host import Host
from dsv4core.testing.subject import Elsewhere, Subject
from dsv4core.testing.suite.marks import check, large

KINDS = [pytest.param(kind, id=kind.name) for kind in (SWA, C4A, C128A)]
STEPS = {
    "decode": ((1, 127, 128, 700, 5, 3000), (1, 1, 1, 1, 1, 1)),
    "prefill": ((0, 0), (70, 9)),
    "chunk": ((300, 64), (67, 5)),
    "mixed": ((2000, 129, 0, 511), (1, 1, 40, 33)),
}
FORMATS = ("fp8_ds_mla", "bf16", "fp8_e4m3")


def compare(
    host: Host, computed: tuple[int, ...], query: tuple[int, ...], factor: float = 1.0, want_lse: bool = False
) -> None:
    """One step with random queries, against the definition."""
    step = host.step(computed, query)
    q, selected = host.query(step, factor), host.select(step)
    output = host.attend(step, q, selected, want_lse=want_lse)
    expected, lse = host.expected(step, q, selected, host.sinks)
    assert_attention(host.heads(output), expected, step, host.plan.q_dtype)
    if want_lse:
        assert_lse(output.lse, lse, step, host.plan.q_dtype)


@check("L3", core=True, reports=("sglang#33134", "flashinfer#5135", "vllm#47783"))
@pytest.mark.parametrize("phase", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_every_phase(dsv4: Subject, kind: LayerKind, phase: str) -> None:
    """DeepSeek-V4-Flash on one rank, in the format that `auto` means."""
    compare(Host(dsv4, Case(kind)), *STEPS[phase])


@check("L3", reports=("vllm#47174", "sglang#33194", "vllm#47716"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_cache_formats(dsv4: Subject, format: str, kind: LayerKind) -> None:
    """Each format that the backend accepts."""
    host = Host(dsv4, Case(kind, heads=0, kv_cache_dtype=format))
    compare(host, *STEPS["mixed"])


@check("L3", reports=("vllm#43827", "vllm#55526"))
@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_a_scale(dsv4: Subject, kind: LayerKind) -> None:
    """Plain FP8 rows, and queries where the backend takes FP8, whose scales are not 1."""
    scales = LayerScales(q=0.5, kv=0.0375)
    host = Host(dsv4, Case(kind, heads=0, kv_cache_dtype="fp8_e4m3", scales=scales))
    if host.caches.window.scale is None:
        raise Elsewhere("Its rows have no scale of their cache.")
    compare(host, *STEPS["mixed"], want_lse="lse" in dsv4.info.capabilities)


@check("L3", core=True, reports=("tpu-inference#3536", "vllm#55927", "transformers#45820", "vllm#52109"))
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_around_every_boundary(dsv4: Subject, kind: LayerKind) -> None:
    """A window, an entry and a page begin and end at the right token."""
    limits = Limits(max_tokens=32, max_requests=32, max_model_len=2304, max_query_len=1)
    lengths = (*range(1, 9), *range(126, 132), *range(254, 260), 511, 512, 513, *range(2046, 2054))
    host = Host(dsv4, Case(kind, limits=limits))
    compare(host, tuple(length - 1 for length in lengths), (1,) * len(lengths))


@check("L3", reports=("flashinfer#3828", "flashinfer#4336", "vllm#56837", "xinfer#387", "vllm#48047"))
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128])
def test_head_counts(dsv4: Subject, heads: int) -> None:
    """Any head count is right, or refused before anything is built."""
    compare(Host(dsv4, Case(C4A, heads)), *STEPS["mixed"])


@check("L3", reports=("vllm#51042", "xinfer#387", "flashinfer#5323"))
@pytest.mark.parametrize("entries", [0, 1, 5, 64, 509, 1025, pytest.param(8192, marks=large)])
def test_widths(dsv4: Subject, entries: int) -> None:
    """Any number of entries, odd ones too: a query attends 128 tokens and these."""
    length = max(128, 128 * entries + 1)
    limits = Limits(max_tokens=4, max_requests=2, max_model_len=length, max_query_len=2)
    compare(Host(dsv4, Case(C128A, heads=0, limits=limits)), (length - 1,), (1,))


@check("L3", reports=("flashinfer#3828", "sglang#33134"))
@pytest.mark.parametrize("k", [64, 192, 512, 1024])
def test_widths_of_chosen_entries(dsv4: Subject, k: int) -> None:
    """Tables of chosen entries that are full, partly filled, and empty."""
    limits = Limits(max_tokens=8, max_requests=4, max_model_len=4608, max_query_len=2)
    compare(Host(dsv4, Case(C4A, heads=0, index_topk=k, limits=limits)), (4500, 777, 255, 2), (1, 1, 1, 1))


@check("L3", reports=("flashinfer#5323", "vllm#55526"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "rows"), [(64, 64), (64, 2), (2, 2), (61, 61), (256, 256), (576, 16)])
def test_page_sizes(dsv4: Subject, kind: LayerKind, window: int, rows: int) -> None:
    """Pages of any size are read right, or refused before anything is built."""
    pages = PageSizes(window=window, context=rows * (kind.ratio or 4))
    limits = Limits(max_tokens=64, max_requests=3, max_model_len=4096, max_query_len=40)
    compare(Host(dsv4, Case(kind, heads=0, page_sizes=pages, limits=limits)), (1500, 130, 150), (1, 1, 40))


@check("L3", needs=("strided-pages",), reports=("vllm#47783", "flashinfer#3856"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_strided_pages(dsv4: Subject, format: str, kind: LayerKind) -> None:
    """Pools whose pages are followed by bytes of something else."""
    host = Host(dsv4, Case(kind, heads=0, kv_cache_dtype=format, page_gap=3))
    compare(host, *STEPS["mixed"])


@check("L3", reports=("vllm#55184",))
@pytest.mark.parametrize("kind", [pytest.param(SWA, id="swa"), pytest.param(C4A, id="c4a", marks=large)])
def test_pages_beyond_two_gib(dsv4: Subject, kind: LayerKind) -> None:
    """Offsets in bytes take more than 32 bits."""
    pages = (1 << 31) // (64 * 512) + 8  # the smallest row that there is has 512 bytes
    limits = Limits(max_tokens=8, max_requests=2, max_model_len=512, max_query_len=4)
    case = Case(kind, heads=0, spare_pages=pages, limits=limits, poison=None)
    compare(Host(dsv4, case), (300, 140), (1, 1))


@check("L3", reports=("flashinfer#5095", "flashinfer#3828"))
@pytest.mark.parametrize("tokens", [1, 3, 65, 74, 321])
def test_numbers_of_queries(dsv4: Subject, tokens: int) -> None:
    """Batches around the sizes at which kernels change their ways."""
    limits = Limits(max_tokens=tokens, max_requests=tokens, max_model_len=512, max_query_len=1)
    computed = tuple(130 + 7 * i % 300 for i in range(tokens))
    compare(Host(dsv4, Case(C4A, heads=0, limits=limits)), computed, (1,) * tokens)


@check("L3", reports=("flashinfer#5095", "vllm#49896", "sglang#36390"))
@pytest.mark.parametrize("tokens", [65, 321])
def test_long_chunks(dsv4: Subject, tokens: int) -> None:
    """A prompt's chunk that begins in the middle of everything."""
    limits = Limits(max_tokens=tokens, max_requests=1, max_model_len=2048, max_query_len=tokens)
    compare(Host(dsv4, Case(C128A, heads=0, limits=limits)), (1021,), (tokens,))


@check("L3", core=True, reports=("Primus-Turbo#417", "flashinfer#5078", "flashinfer#5095"))
@pytest.mark.parametrize("kind", KINDS)
def test_what_must_not_be_read_never_matters(dsv4: Subject, kind: LayerKind) -> None:
    """Free pages, rows beyond a length, entries that are not chosen: right, whatever they hold."""
    for poison in (0, NAN, HUGE):
        compare(Host(dsv4, Case(kind, heads=64, poison=poison)), *STEPS["mixed"])


@check("L3", core=True, reports=("Primus-Turbo#417", "vllm#41601"))
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_attend_gives_zero(dsv4: Subject, kind: LayerKind) -> None:
    """A query whose pages are all gone, and whose chosen entries are none: exactly 0, whatever the sink."""
    host = Host(dsv4, Case(kind))
    host.sinks[::3] = float("-inf")
    layer = host.bind(host.sinks)
    step = host.build((3, 300), (1, 1))
    step.window.block_table[0] = -1
    if kind.ratio is not None:
        step.compressed[kind.name].block_table[0] = -1
    host.plan_step(step)
    q, selected = host.query(step), host.select(step)
    output = host.attend(step, q, selected, layer=layer)
    expected, _ = host.expected(step, q, selected, host.sinks)
    assert float(expected[0].abs().max()) == 0
    assert_attention(host.heads(output), expected, step, host.plan.q_dtype)


@check("L3", core=True, reports=("atlas#341", "sglang#35092", "tokenspeed#254"))
def test_sinks(dsv4: Subject) -> None:
    """Sinks that take nothing, nearly everything, and anything between, each for its own head."""
    host = Host(dsv4, Case(SWA))
    sinks = host.normal(host.spec.num_heads) * 4
    sinks[0::7], sinks[1::7] = float("-inf"), 12.0
    step = host.step(*STEPS["mixed"])
    q = host.query(step)
    output = host.attend(step, q, None, layer=host.bind(sinks))
    expected, _ = host.expected(step, q, None, sinks)
    assert_attention(host.heads(output), expected, step, host.plan.q_dtype)


@check("L3", core=True, reports=("vllm#41601",))
def test_large_scores(dsv4: Subject) -> None:
    """Scores of several hundreds, whose exponentials no float holds."""
    compare(Host(dsv4, Case(C4A)), *STEPS["decode"], factor=150.0)


@check("L3", needs=("lse",), reports=("vllm#44573", "sglang#30416", "local-inference-lab/vllm#56"))
@pytest.mark.parametrize("kind", KINDS)
def test_log_sum_exp(dsv4: Subject, kind: LayerKind) -> None:
    """Natural logarithm, without the sink, fp32."""
    compare(Host(dsv4, Case(kind)), *STEPS["mixed"], want_lse=True)


@check("L3", needs=("lse",), reports=("vllm#41601",))
def test_log_sum_exp_of_nothing(dsv4: Subject) -> None:
    """Minus infinity where nothing is attended."""
    host = Host(dsv4, Case(SWA))
    step = host.build((3, 300), (1, 1))
    step.window.block_table[0] = -1
    host.plan_step(step)
    q = host.query(step)
    output = host.attend(step, q, None, want_lse=True)
    _, lse = host.expected(step, q, None, None)
    assert_lse(output.lse, lse, step, host.plan.q_dtype)


@check("L3", needs=("defer-sink",), reports=("vllm#57228", "sglang#37407"))
@pytest.mark.parametrize("kind", KINDS)
def test_sink_left_to_the_host(dsv4: Subject, kind: LayerKind) -> None:
    """`apply_sink=False` leaves the sink out, also where nothing is attended; the log-sum-exp is the same."""
    host = Host(dsv4, Case(kind))
    step = host.build(*STEPS["mixed"])
    step.window.block_table[1] = -1
    if kind.ratio is not None:
        step.compressed[kind.name].block_table[1] = -1
    host.plan_step(step)
    q, selected = host.query(step), host.select(step)
    output = host.attend(step, q, selected, want_lse="lse" in dsv4.info.capabilities, apply_sink=False)
    expected, lse = host.expected(step, q, selected, None)
    assert_attention(host.heads(output), expected, step, host.plan.q_dtype)
    if "lse" in dsv4.info.capabilities:
        assert_lse(output.lse, lse, step, host.plan.q_dtype)


@check("L3", needs=("tensor-parallel",), reports=("sglang#35092", "tokenspeed#254"))
def test_a_ranks_heads(dsv4: Subject) -> None:
    """The second of two ranks, with sinks of its own."""
    compare(Host(dsv4, Case(C4A, ranks=2, rank=1)), *STEPS["mixed"])


@check("L3", core=True)
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_left_as_they_are(dsv4: Subject, kind: LayerKind) -> None:
    """q, caches, chosen entries and the step's tensors are read only, in planning, too."""
    host = Host(dsv4, Case(kind))
    step = host.build(*STEPS["mixed"])
    read = {name: value for name, value in vars(step).items() if isinstance(value, torch.Tensor)}
    for place, table in {"window": step.window, **step.compressed}.items():
        read |= {f"{place} block table": table.block_table, f"{place} slot mapping": table.slot_mapping}
    before = {name: tensor.clone() for name, tensor in read.items()}
    host.plan_step(step)
    for name, tensor in read.items():
        assert_same(tensor, before[name], f"plan_step wrote to the step's {name}")
    q, selected = host.query(step), host.select(step)
    read |= {"q": q} if selected is None else {"q": q, "table of chosen entries": selected}
    before = {name: tensor.clone() for name, tensor in read.items()}
    pools = {"window": host.caches.window, "compressed": host.caches.compressed}
    copies = {name: snapshot(cache) for name, cache in pools.items()}
    host.attend(step, q, selected)
    for name, tensor in read.items():
        assert_same(tensor, before[name], f"forward_mqa wrote to its {name}")
    for name, cache in pools.items():
        after, copy = snapshot(cache), copies[name]
        if after is not None and copy is not None:
            assert_same(after, copy, f"forward_mqa wrote to the {name} cache")


@check("L3", core=True)
def test_an_offered_buffer(dsv4: Subject) -> None:
    """`out` may be filled or ignored; what it held does not matter."""
    host = Host(dsv4, Case(C4A))
    step = host.step(*STEPS["mixed"])
    q, selected = host.query(step), host.select(step)
    heads = host.plan.padded_q_heads if host.plan.output.padded else host.spec.num_heads
    dtype = host.attend(step, q, selected).data.dtype
    out = torch.full((step.num_tokens, heads, 512), float("nan"), dtype=dtype, device=host.device)
    output = host.attend(step, q, selected, out=out)
    expected, _ = host.expected(step, q, selected, host.sinks)
    assert_attention(host.heads(output), expected, step, host.plan.q_dtype)


@check("L3", needs=("deterministic",), reports=("sglang#36174", "vllm#53257", "vllm#54955"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_output_does_not_depend_on_its_batch(dsv4: Subject, kind: LayerKind) -> None:
    """The same request alone and among others: the same bits."""
    outputs = []
    for others, place in ((0, 0), (2, 0), (16, 7), (63, 63)):
        limits = Limits(max_tokens=64, max_requests=64, max_model_len=1024, max_query_len=1)
        host = Host(dsv4, Case(kind, heads=0, limits=limits, deterministic=True))
        alone = host.step((900,), (1,))
        q, selected = host.query(alone), host.select(alone)
        host.requests.insert(place, host.requests.pop(0))
        computed = [100 + 7 * i for i in range(others)]
        step = host.step((*computed[:place], 900, *computed[place:]), (1,) * (1 + others))
        rest = host.query(replace(step, positions=step.positions[1:]))
        if selected is not None:
            more = torch.full((others, selected.shape[1]), -1, dtype=torch.int32, device=host.device)
            selected = torch.cat([more[:place], selected, more[place:]])
        found = host.attend(step, torch.cat([rest[:place], q, rest[place:]]), selected)
        outputs.append(host.heads(found)[place].clone())
    for output in outputs[1:]:
        assert_same(output, outputs[0], "A row's output depends on the other rows of its batch")


@check("L3", needs=("deterministic",), reports=("1Cat-vLLM#162", "vllm#53257"))
def test_the_same_call_gives_the_same_bits(dsv4: Subject) -> None:
    """No order of threads shows in the output."""
    host = Host(dsv4, Case(C4A, deterministic=True))
    step = host.step(*STEPS["mixed"])
    q, selected = host.query(step), host.select(step)
    first = host.heads(host.attend(step, q, selected)).clone()
    for _ in range(20):
        assert_same(host.heads(host.attend(step, q, selected)), first, "The same call gives other bits")
