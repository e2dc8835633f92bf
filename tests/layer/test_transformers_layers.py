"""Each layer kind in fp32 against transformers' eager attention on weights that transformers wrote."""

from types import SimpleNamespace

import pytest
import torch

from dsv4core.api import Limits, Request
from dsv4core.framework.selection import select
from dsv4core.model.checkpoint import Checkpoint
from dsv4core.stack import AttentionStack, load_layer

transformers = pytest.importorskip("transformers", minversion="5.17", reason="the oracle is not installed")

PREFILL, DECODE, TOP_K = 1100, 40, 32
TIE = 1e-6


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        vocab_size=64,
        hidden_size=128,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=8,
        q_lora_rank=64,
        n_routed_experts=2,
        num_experts_per_tok=1,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        o_groups=4,
        o_lora_rank=32,
        index_n_heads=4,
        index_topk=TOP_K,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
        initializer_range=0.1,
        attn_implementation="eager",
    )
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():  # what transformers initialises with zeros and ones would hide mistakes
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "position_bias")):
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    directory = tmp_path_factory.mktemp("transformers")
    model.save_pretrained(directory)
    return SimpleNamespace(model=model, directory=directory)


@pytest.fixture(scope="module")
def stack(oracle):
    checkpoint = Checkpoint.open(oracle.directory)
    length = PREFILL + DECODE
    request = Request(
        platform="cpu",
        arch="",
        model=checkpoint.shape,
        num_heads=8,
        limits=Limits(PREFILL, 1, length, PREFILL),
        kv_cache_dtype="fp32",
        index_dtype="fp32",
        dtype="float32",
    )
    selection, device = select(request, "reference"), torch.device("cpu")
    return AttentionStack(selection, [load_layer(selection, checkpoint, i, device) for i in range(3)], device)


class OracleSteps:
    """transformers' attention modules, step by step with one cache."""

    def __init__(self, model):
        from transformers.cache_utils import DynamicCache

        self.model, self.cache, self.chosen = model, DynamicCache(config=model.config), None
        indexer = model.model.layers[1].self_attn.compressor.indexer
        self.hook = indexer.register_forward_hook(lambda module, args, out: setattr(self, "chosen", out[0]))

    def begin(self, start, hidden):
        from transformers.masking_utils import create_sliding_window_causal_mask

        self.positions = torch.arange(start, start + hidden.shape[1])[None]
        self.mask = create_sliding_window_causal_mask(
            self.model.config, hidden, None, self.cache, position_ids=self.positions
        )
        rotary = self.model.model.rotary_emb
        self.rope = {name: rotary(hidden, self.positions, name) for name in ("main", "compress")}

    def attend(self, index, hidden):
        attention = self.model.model.layers[index].self_attn
        return attention(hidden, self.rope, self.positions, self.mask, self.cache)[0][0]


@torch.no_grad()
def test_each_kind_against_transformers(oracle, stack):
    hidden = torch.randn(1, PREFILL + DECODE, 128, generator=torch.Generator().manual_seed(1))
    steps = OracleSteps(oracle.model)
    differing = 0
    for start, count in [(0, PREFILL), *((PREFILL + i, 1) for i in range(DECODE))]:
        part = hidden[:, start : start + count]
        step = stack.plan([start], [count])
        steps.begin(start, part)
        for layer in stack.layers:
            expected = steps.attend(layer.spec.index, part)
            out, selected = stack.attend(layer, part[0], step)
            if selected is not None and not same_sets(selected, steps.chosen):
                differing += assert_ties(stack, layer, part[0], step, selected, steps.chosen)
                out, _ = stack.attend(layer, part[0], step, steps.chosen.int())
            relative = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert relative.max() < 1e-5, f"{layer.spec.kind.name} at {start}: {relative.max():.2e}"
    assert differing < PREFILL  # ties are the exception; most sets are equal
    steps.hook.remove()


def same_sets(ours, theirs):
    width = max(ours.shape[1], theirs.shape[1])

    def row_sets(table):
        padded = torch.nn.functional.pad(table.long(), (0, width - table.shape[1]), value=-1)
        return padded.sort(-1).values

    return torch.equal(row_sets(ours), row_sets(theirs))


def assert_ties(stack, layer, hidden, step, ours, theirs):
    """Where sets differ, the entries that only one of them has score alike. Returns the rows that differ."""
    attention, caches = layer.attention, stack.pools.layers[layer.spec.index]
    scores = scores_of(attention, hidden, caches, step)
    rows = 0
    for t in range(len(hidden)):
        mine = {e for e in ours[t].tolist() if e >= 0}
        other = {e for e in theirs[t].tolist() if e >= 0}
        assert len(mine) == len(other)
        only = sorted(mine ^ other)
        if only:
            rows += 1
            spread = scores[t, only].max() - scores[t, only].min()
            assert spread <= TIE
    return rows


def scores_of(attention, hidden, caches, step):
    """The indexer's scores from the cached keys."""
    from dsv4core import ops

    projected = attention.project(hidden)
    q, weights = ops.index_query(
        projected.index_q, projected.index_weights, step.positions, attention.rope, "fp32"
    )
    table = step.compressed["c4a"]
    visible = (step.positions + 1) // 4
    width = int(visible.max())
    return ops.index_logits(q, weights, caches.index, table, step.token_to_request, visible, width)
