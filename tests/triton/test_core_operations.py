"""The core's operations in kernels, for a backend that leaves all of them to the core."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4core.api import CheckpointError, LayerWeights, Limits, Request, Weight
from dsv4core.attention import DeepseekV4Attention
from dsv4core.framework.binding import bind_layer
from dsv4core.framework.platform import machine_of
from dsv4core.framework.selection import Selection, select
from dsv4core.model.checkpoint import Checkpoint
from dsv4core.model.shapes import layer_spec
from dsv4core.stack import AttentionStack, load_layer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_layer(index: int, tiny_checkpoint: str) -> None:
    """Two steps of a layer of each kind give what the definitions give."""
    checkpoint, machine = Checkpoint.open(tiny_checkpoint), machine_of(DEVICE)
    request = Request(
        platform=machine.platform,
        arch=machine.arch,
        model=checkpoint.shape,
        num_heads=checkpoint.shape.num_attention_heads,
        limits=Limits(max_tokens=12, max_requests=2, max_model_len=600, max_query_len=12),
        dtype="float32",
        host_lengths=False,  # the widths of the limits: entries are scored, however few there are
    )
    defined = select(request, "reference")
    in_kernels = {kind: replace(plan, core_ops="triton") for kind, plan in defined.plans.items()}
    selections: list[Selection] = [defined, replace(defined, plans=in_kernels)]
    stacks = [AttentionStack(own, [load_layer(own, checkpoint, index, DEVICE)], DEVICE) for own in selections]
    for computed, query in (((0, 0), (7, 4)), ((7, 4), (1, 5))):
        hidden = torch.randn(sum(query), checkpoint.shape.hidden_size, device=DEVICE)
        results = []
        for stack in stacks:
            step = stack.plan(computed, query)
            results.append(stack.attend(stack.layers[0], hidden, step))
        off = (results[1][0] - results[0][0]).norm() / results[0][0].norm()
        assert float(off) < 1e-3, "more than a few codes of the caches differ"
        if index == 1:
            assert torch.equal(results[1][1], results[0][1])


def test_weights_of_one_output_have_one_form(tiny_checkpoint: str) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    weights = checkpoint.layer(1, max_positions=64)
    tensors = weights.tensors | {"compressor.wgate": Weight(weights["compressor.wgate"].data.half())}
    request = Request(
        platform="cpu",
        arch="",
        model=checkpoint.shape,
        num_heads=checkpoint.shape.num_attention_heads,
        limits=Limits(max_tokens=1, max_requests=1, max_model_len=64, max_query_len=1),
    )
    defined = select(request, "reference")
    plans = {kind: replace(plan, core_ops="triton") for kind, plan in defined.plans.items()}
    selection, device = replace(defined, plans=plans), torch.device("cpu")
    other = LayerWeights(tensors, weights.rope)
    bound = bind_layer(selection, layer_spec(checkpoint.shape, 1), other, device)
    with pytest.raises(
        CheckpointError, match=r"wgate are \[.*\] torch.bfloat16, \[.*\] torch.float16; store"
    ):
        DeepseekV4Attention(bound, other, selection.layout)
