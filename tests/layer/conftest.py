"""Stacks over the tiny checkpoint, and slices of what a layer projects."""

from dataclasses import fields

import pytest
import torch

from dsv4core.api import Limits, Request
from dsv4core.attention import Projected
from dsv4core.framework.selection import select
from dsv4core.model.checkpoint import Checkpoint
from dsv4core.stack import AttentionStack, load_layer

KINDS = {"swa": 0, "c4a": 1, "c128a": 2}
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint):
    return Checkpoint.open(tiny_checkpoint)


@pytest.fixture(scope="session")
def make_stack(checkpoint):
    loaded = {}

    def make(
        layers=(0, 1, 2),
        requests=1,
        length=512,
        kv="fp32",
        index="fp32",
        dtype="float32",
        decode_query_len=1,
        rank=0,
        ranks=1,
        max_query_len=None,
    ):
        request = Request(
            platform="cpu",
            arch="",
            model=checkpoint.shape,
            num_heads=checkpoint.shape.num_attention_heads // ranks,
            limits=Limits(requests * length, requests, length, max_query_len or length),
            kv_cache_dtype=kv,
            index_dtype=index,
            dtype=dtype,
            decode_query_len=decode_query_len,
            tensor_parallel=ranks,
        )
        selection = select(request, "reference")
        stacked = []
        for index_ in layers:
            key = (index_, selection.layout, dtype, length, rank, ranks)
            if key not in loaded:
                loaded[key] = load_layer(selection, checkpoint, index_, CPU, rank=rank)
            stacked.append(loaded[key])
        return AttentionStack(selection, stacked, CPU)

    return make


def rows_of(projected: Projected, rows) -> Projected:
    """The same projections for some tokens only: chunks of them are bit for bit the same inputs."""
    values = {f.name: getattr(projected, f.name) for f in fields(projected)}
    return Projected(**{name: None if value is None else value[rows] for name, value in values.items()})


def attend(stack, layer, projected, step):
    """A layer from its projections on."""
    attention, caches = layer.attention, stack.pools.layers[layer.spec.index]
    q = attention.insert_kv(projected, caches, step)
    attention.compress(projected, caches, step)
    selected = attention.select(projected, caches, step, None)
    return attention.attend(q, selected, caches, step, stack.kind_state(layer)).data


def run_alone(stack, layer, projected, chunks):
    """One request in chunks; its attention outputs."""
    outputs, done = [], 0
    for count in chunks:
        step = stack.plan([done], [count])
        outputs.append(attend(stack, layer, rows_of(projected, slice(done, done + count)), step))
        done += count
    return torch.cat(outputs)


def hidden_states(tokens, seed=0, dtype=torch.float32):
    return torch.randn(tokens, 256, generator=torch.Generator().manual_seed(seed)).to(dtype)
