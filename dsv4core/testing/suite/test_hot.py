"""L4: what is hot: captured and replayed, without waiting, in the memory that was planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4core.api import C4A, C128A, OWN_OPS, SWA, LayerKind, Limits
from dsv4core.stack import AttentionStack
from dsv4core.testing.case import Case
from dsv4core.testing.compare import assert_attention, assert_rows
from dsv4core.testing.host import Host
from dsv4core.testing.hot import ROUNDING, Replayed, captured, within_memory, without_waiting, wrap_hooks
from dsv4core.testing.layers import backend_stack, caches_of, hidden_states, reference_stack
from dsv4core.testing.ledger import Ledger
from dsv4core.testing.subject import Elsewhere, LeftToCore, Subject
from dsv4core.testing.suite.marks import check
from dsv4core.testing.suite.test_layers import compare
from dsv4core.testing.tolerances import layer_tolerance

KINDS = [pytest.param(kind, id=kind.name) for kind in (SWA, C4A, C128A)]
BATCHES = (1, 8, 33, 64)
LENGTHS = (4096, 4090, 300, 129, 2000, 2, 1500, 650)
PROMPTS: tuple[int, ...] = (600, 126, 257, 3)


def graph_case(kind: LayerKind, batch: int, decode_query_len: int) -> Case:
    """Decodes of up to `batch` requests that are captured."""
    tokens = batch * decode_query_len
    limits = Limits(tokens, max_requests=batch, max_model_len=4096, max_query_len=decode_query_len)
    return Case(kind, heads=0, limits=limits, decode_query_len=decode_query_len, graph=True)


def attend(stack: AttentionStack, computed: tuple[int, ...], query: tuple[int, ...]) -> None:
    """One step of new requests, whose result nobody keeps."""
    for request in range(stack.selection.request.limits.max_requests):
        stack.release(request)
    hidden = hidden_states(sum(query), stack)
    stack.attend(stack.layers[0], hidden, stack.plan(computed, query))


def decoding(
    subject: Subject,
    kind: LayerKind,
    host_lengths: bool | None = None,
    prompts: tuple[int, ...] = PROMPTS,
) -> tuple[AttentionStack, AttentionStack]:
    """A layer on the backend and on the reference, in which some prompts are done."""
    tokens, requests = max(1000, sum(prompts)), len(prompts)
    limits = Limits(tokens, max_requests=requests, max_model_len=1024, max_query_len=600)
    case = Case(
        kind, 0, index_topk=128, limits=limits, graph=True, private_output=True, host_lengths=host_lengths
    )
    ours = backend_stack(subject, case)
    theirs = reference_stack(ours)
    compare(ours, theirs, (0,) * requests, prompts)
    return ours, theirs


class Replay:
    """Attention of a host's decodes: captured for one step, replayed for others."""

    def __init__(self, host: Host, computed: tuple[int, ...], query: int, remains: bool = False) -> None:
        """Capture a step in which every request has `query` tokens.

        Args:
            remains: Whether other steps' rows of padding hold what earlier steps left.
        """
        self.host, self.remains = host, remains
        self.captured = host.build(computed, (query,) * len(computed))
        self.q, self.selected = host.query(self.captured), host.select(self.captured)
        host.kind.prepare_step(self.captured)
        self.replay = captured(self._run, host.device)

    def _run(self) -> torch.Tensor:
        self.host.kind.plan_step(self.captured)
        return self.host.heads(self.host.attend(self.captured, self.q, self.selected))

    def compare(self, computed: tuple[int, ...], query: tuple[int, ...]) -> None:
        """Replay for a step, and compare with the definition."""
        host, before = self.host, [rows.clone() for rows in self._padded()]
        step = host.build(computed, query)
        if self.remains:
            counts = {len(self.captured.seq_lens): len(query), self.captured.num_tokens: step.num_tokens}
            for rows, old in zip(self._padded(), before, strict=True):
                rows[counts[len(rows)] :] = old[counts[len(rows)] :]
        host.kind.prepare_step(step)
        q, selected = host.query(step), host.select(step)
        self.q[: step.num_tokens] = q
        if self.selected is not None and selected is not None:
            self.selected[: step.num_tokens] = selected  # behind it lies what earlier steps chose
        found = self.replay()[: step.num_tokens]
        expected, _ = host.expected(step, q, selected, host.sinks)
        assert_attention(found, expected, step, host.plan.q_dtype)

    def _padded(self) -> list[torch.Tensor]:
        """The step's tensors that an engine does not clear behind a step's rows. Slots are -1 there."""
        step = self.captured
        tables = [step.window.block_table, *(table.block_table for table in step.compressed.values())]
        return [step.positions, step.token_to_request, step.seq_lens, *tables]


@check("L4", needs=("graph",), reports=("vllm#51318", "flashinfer#5015"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_graph_replays_other_lengths(dsv4: Subject, batch: int, kind: LayerKind) -> None:
    """Captured with the shortest requests, replayed with the longest, and with fewer of them."""
    host = Host(dsv4, graph_case(kind, batch, decode_query_len=1))
    replay = Replay(host, (1,) * batch, query=1)
    longest = tuple(LENGTHS[i % 8] - 1 for i in range(batch))
    for computed in (longest, longest[: batch // 2 + 1], (128,) * batch, (1,) * batch, (4095,)):
        replay.compare(computed, (1,) * len(computed))


@check("L4", needs=("graph",), reports=("vllm#55637", "ROCm/ATOM#1595"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_of_a_buffer_with_remains(dsv4: Subject, kind: LayerKind) -> None:
    """Behind a step's rows lies what earlier steps left there: requests, positions, lengths and pages."""
    host = Host(dsv4, graph_case(kind, 8, decode_query_len=1))
    replay = Replay(host, tuple(length - 1 for length in LENGTHS), query=1, remains=True)
    for computed in ((600, 4001, 131), (5,), (2000,) * 7):
        replay.compare(computed, (1,) * len(computed))


@check("L4", needs=("graph", "multi-token-decode"), reports=("vllm#51593", "flashinfer#3828"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [1, 5])
def test_a_graph_of_several_query_tokens(dsv4: Subject, drafts: int, kind: LayerKind) -> None:
    """Decodes with drafts, captured for as many as there can be."""
    host = Host(dsv4, graph_case(kind, 8, decode_query_len=drafts + 1))
    replay = Replay(host, (1,) * 8, query=drafts + 1)
    for computed, query in (((4000, 125, 300, 2), (drafts + 1,) * 4), ((2000, 127, 64), (1, drafts + 1, 1))):
        replay.compare(computed, query)


@check("L4", needs=("graph",), owned=("insert_kv", "compress"), reports=("vllm#55637", "sglang#31705"))
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_write_what_steps_write(dsv4: Subject, kind: LayerKind) -> None:
    """Owned operations, each captured for eight requests: padding writes nothing."""
    limits = Limits(max_tokens=1100, max_requests=8, max_model_len=300, max_query_len=257)
    ledger = Ledger(dsv4, Case(kind, heads=0, limits=limits, graph=True, private_output=True))
    computed: tuple[int, ...] = (1, 2, 3, 125, 126, 127, 254, 257)
    ledger.step((0,) * 8, computed)
    wrap_hooks(ledger.stack, lambda name, hook: Replayed(hook, dsv4.device))
    for count in (8, 8, 3, 6, 1, 8):
        ledger.step(computed[:count], (1,) * count)
        ledger.check()
        computed = tuple(known + (i < count) for i, known in enumerate(computed))


@check("L4", needs=("graph",), reports=("vllm#51318", "vllm#51593"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_graphs(dsv4: Subject, kind: LayerKind) -> None:
    """A layer's decodes, every hook captured: those of the core run between them."""
    ours, theirs = decoding(dsv4, kind)
    wrap_hooks(ours, lambda name, hook: Replayed(hook, dsv4.device))
    computed = PROMPTS
    for seed, count in enumerate((4, 4, 2, 3, 1, 4)):
        compare(ours, theirs, computed[:count], (1,) * count, seed)
        computed = tuple(known + (i < count) for i, known in enumerate(computed))


@check("L4", needs=("graph",), reports=("vllm#51318", "sglang#29885"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_in_one_graph(dsv4: Subject, kind: LayerKind) -> None:
    """Projections, the step's plan and all operations together, where the backend owns those of the core."""
    in_one_graph(dsv4, kind, PROMPTS, (4, 4, 2, 3, 1, 4))


def in_one_graph(dsv4: Subject, kind: LayerKind, prompts: tuple[int, ...], counts: tuple[int, ...]) -> None:
    """A layer captured for a decode behind each prompt, and replayed for the first of them."""
    ours, theirs = decoding(dsv4, kind, prompts=prompts)
    layer, plan = ours.layers[0], ours.selection.plans[kind.name]
    own = OWN_OPS if plan.core_ops == "triton" else plan.own_ops  # kernels can be captured
    needed = OWN_OPS if kind.select == "top_k" else {"insert_kv", "compress"} if kind.ratio else {"insert_kv"}
    if missing := sorted(needed - own):
        raise LeftToCore(f"The core does {', '.join(missing)}, which cannot be captured.")
    bound, caches, computed = ours.kinds[kind.name], caches_of(ours), prompts
    planned = ours.plan(prompts, (1,) * len(prompts))

    def run(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        bound.plan_step(planned)
        return layer.attention.forward(hidden, planned, caches, bound.state)

    ours.kinds[kind.name] = replace(bound, plan_step=lambda step: None)  # the graph has to plan
    whole = Replayed(run, dsv4.device)
    for seed, count in enumerate(counts):
        ours.plan(computed[:count], (1,) * count)
        step, hidden = theirs.plan(computed[:count], (1,) * count), hidden_states(count, ours, seed)
        found, selected = whole(hidden)
        selected = None if selected is None else selected[:count]
        expected, _ = theirs.attend(theirs.layers[0], hidden, step, selected)
        tolerance = layer_tolerance(dsv4.dtype, ours.selection.plans[kind.name].q_dtype)
        assert_rows(found[:count], expected, tolerance, f"output of a {kind.name} layer", step)
        computed = tuple(known + (i < count) for i, known in enumerate(computed))


@check("L4", needs=("graph",))
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_hot_waits_for_the_device(dsv4: Subject, kind: LayerKind) -> None:
    """A hook that reads a value on the host stalls every step, captured or not."""
    if dsv4.device.type != "cuda":
        raise Elsewhere("Waiting for a device can be seen on a GPU only.")
    ours, theirs = decoding(dsv4, kind)
    compare(ours, theirs, PROMPTS, (1, 1, 1, 200))  # what is only done at first is done
    wrap_hooks(ours, without_waiting)
    for computed, query in (((601, 127, 258, 203), (1,) * 4), ((602, 128, 259, 204), (1, 1, 1, 90))):
        compare(ours, theirs, computed, query)


@check("L4", reports=("vllm#51743", "vllm#41700"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("private", [False, True], ids=["dense", "private"])
def test_temporary_memory_is_what_the_plan_says(
    dsv4: Subject, private: bool, heads: int, kind: LayerKind
) -> None:
    """A host reserves `workspace_bytes` and what hooks return; no hook takes more."""
    if dsv4.device.type != "cuda":
        raise Elsewhere("torch counts the memory of a GPU only.")
    limits = Limits(max_tokens=2048, max_requests=8, max_model_len=8192, max_query_len=2048)
    stack = backend_stack(dsv4, Case(kind, heads=heads, limits=limits, private_output=private, poison=0))
    allowed = stack.selection.plans[kind.name].workspace_bytes
    steps = (((0,), (2048,)), ((6000,), (2048,)), ((8000,) * 8, (1,) * 8))
    torch.matmul(*[torch.ones(64, 64, device=dsv4.device, dtype=torch.bfloat16)] * 2)  # torch's own workspace
    before = torch.cuda.memory_allocated()
    for measured in (False, True):
        for computed, query in steps:
            attend(stack, computed, query)
        kept = torch.cuda.memory_allocated() - before
        assert kept <= allowed + ROUNDING, (
            f"After {'more' if measured else 'the first'} steps {kept:,} bytes are kept, and the plan's "
            f"workspace_bytes are {allowed:,}."
        )
        wrap_hooks(stack, within_memory(allowed))
