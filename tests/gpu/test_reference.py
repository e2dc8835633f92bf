"""The definitions on a GPU: the same bytes as on a CPU, and the same numbers to rounding.

python -m pytest -m gpu tests/gpu
"""

import json

import pytest
import torch

from dsv4core.api import Limits, Request
from dsv4core.cli.main import main
from dsv4core.framework.platform import machine_of
from dsv4core.framework.selection import select
from dsv4core.kvcache import allocate_cache, cache_layout, with_fp8_flavour
from dsv4core.model.checkpoint import Checkpoint
from dsv4core.model.rope import rope_table
from dsv4core.model.shapes import PRESETS
from dsv4core.ops import index_query, index_topk, inverse_rope_quant, qk_norm_rope_insert, sparse_mla
from dsv4core.stack import AttentionStack, load_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]

MODEL = PRESETS["v4_flash"]
FORMATS = ["fp8_ds_mla", "bf16", "fp8_e4m3", "fp32"]


def everywhere(*tensors):
    """The tensors on the CPU, and on the GPU."""
    return tensors, tuple(tensor.cuda() for tensor in tensors)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("flavour", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("strided", [False, True])
def test_caches_hold_the_same_bytes(name, flavour, strided):
    format = cache_layout(MODEL, name, "fp8").window
    if format.fp8 is not None:
        format = with_fp8_flavour(format, flavour)
    generator = torch.Generator().manual_seed(0)
    magnitude = 10.0 ** torch.randint(-8, 6, (300, 1), generator=generator)
    rows = torch.randn(300, 512, generator=generator) * magnitude
    rows[0], rows[1, 7], rows[2, 500] = 0.0, float("nan"), float("inf")
    slots = torch.randperm(320, generator=generator)[:300]
    stride = format.page_bytes(64) + 2 * format.page_alignment if strided else None
    caches = [allocate_cache(format, 5, 64, device, stride) for device in ("cpu", "cuda")]
    for cache, inputs in zip(caches, everywhere(slots, rows), strict=True):
        cache.write(*inputs)
    read = [cache.read(s).cpu() for cache, (s,) in zip(caches, everywhere(slots), strict=True)]
    assert torch.equal(read[0].nan_to_num(nan=3e38), read[1].nan_to_num(nan=3e38))
    finite = [(slot // 64, slot % 64) for slot in slots[3:].tolist()]  # NaN has many encodings
    for one, other in zip(*(cache.regions for cache in caches), strict=True):
        differing = [place for place in finite if not torch.equal(one[place], other[place].cpu())]
        assert differing == []


@pytest.mark.parametrize("name", FORMATS)
def test_insert_gives_the_same_key_to_a_code(name):
    generator = torch.Generator().manual_seed(1)
    q, kv = torch.randn(50, 16, 512, generator=generator), torch.randn(50, 512, generator=generator)
    positions, slots = torch.arange(50) * 7, torch.randperm(64, generator=generator)[:50]
    results = []
    for device, tensors in zip(
        ("cpu", "cuda"), everywhere(q.bfloat16(), kv.bfloat16(), positions), strict=True
    ):
        window = allocate_cache(cache_layout(MODEL, name, "fp8").window, 1, 64, device)
        table = rope_table(MODEL.rope, 64, 512, device)
        out = qk_norm_rope_insert(*tensors, table, window, slots.to(device), 1e-6, 64)
        results.append((out.cpu(), window.read(slots.to(device)).cpu()))
    torch.testing.assert_close(results[0][0], results[1][0], atol=0, rtol=2**-7)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-3, rtol=2**-3)
    differing = ~torch.isclose(*(key for _, key in results), rtol=1e-5, atol=1e-6)
    assert differing.float().mean() < 1e-3


def test_attention_and_quantisation_agree():
    generator = torch.Generator().manual_seed(2)
    cache = allocate_cache(cache_layout(MODEL, "fp8_ds_mla", "fp8").window, 8, 64)
    cache.write(torch.arange(512), torch.randn(512, 512, generator=generator))
    moved = type(cache)(cache.pool.cuda(), cache.format)
    q = torch.randn(70, 16, 512, generator=generator)
    slots = torch.randint(-1, 512, (70, 200), generator=generator).int()
    slots[-1] = -1
    sinks = torch.randn(16, generator=generator)
    one = sparse_mla(q, [(cache, slots)], 512**-0.5, sinks, want_lse=True)
    other = sparse_mla(q.cuda(), [(moved, slots.cuda())], 512**-0.5, sinks.cuda(), want_lse=True)
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs.cpu(), atol=1e-5, rtol=1e-4)
    assert torch.equal(other[0][-1].cpu(), torch.zeros(16, 512))
    table, positions = rope_table(MODEL.compress_rope, 64, 512), torch.arange(70)
    codes, scale = inverse_rope_quant(q, positions, table)
    gpu_codes, gpu_scale = inverse_rope_quant(q.cuda(), positions.cuda(), table.cuda())
    assert torch.equal(scale, gpu_scale.cpu())
    assert (codes.float() != gpu_codes.cpu().float()).float().mean() < 1e-3
    index_q, weights = torch.randn(70, 8, 128, generator=generator), torch.randn(70, 8, generator=generator)
    mine = index_query(index_q, weights, positions, table, "fp8")
    theirs = index_query(index_q.cuda(), weights.cuda(), positions.cuda(), table.cuda(), "fp8")
    assert (mine[0].float() != theirs[0].cpu().float()).float().mean() < 1e-3
    torch.testing.assert_close(mine[1], theirs[1].cpu())


def test_topk_is_exact_with_ties():
    logits = torch.randint(0, 50, (64, 5000), generator=torch.Generator().manual_seed(3)).float()
    logits[5] = float("nan")
    logits[6, 10:] = -float("inf")
    visible = torch.randint(5001, (64,))
    assert torch.equal(index_topk(logits, visible, 512), index_topk(logits.cuda(), visible.cuda(), 512).cpu())


@pytest.mark.parametrize("index", range(3))
def test_layers_agree_with_the_cpu(tiny_checkpoint, index):
    checkpoint = Checkpoint.open(tiny_checkpoint)
    x = torch.randn(400, 256, generator=torch.Generator().manual_seed(4))
    outputs = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        machine = machine_of(device)
        request = Request(
            machine.platform,
            machine.arch,
            checkpoint.shape,
            16,
            Limits(400, 1, 400, 400),
            kv_cache_dtype="fp32",
            index_dtype="fp32",
            dtype="float32",
        )
        selection = select(request, "reference")
        stack = AttentionStack(selection, [load_layer(selection, checkpoint, index, device)], device)
        parts, done = [], 0
        for count in (300, 99, 1):
            hidden = x[done : done + count].to(device)
            parts.append(stack.attend(stack.layers[0], hidden, stack.plan([done], [count]))[0].cpu())
            done += count
        outputs.append(torch.cat(parts))
    error = (outputs[0] - outputs[1]).norm(dim=-1) / outputs[0].norm(dim=-1)
    assert error.median() < 1e-5
    assert (error > 1e-4).sum() <= 2  # the indexer may decide a near tie otherwise


@pytest.mark.parametrize("kv", FORMATS)
def test_run_on_the_gpu(tiny_checkpoint, capsys, kv):
    overrides = ["prefill=300", "decode=8", "batch=3", "chunk=128", "verify=true", "json=true"]
    code = main(
        [
            "run",
            "device=cuda",
            "backend=reference",
            f"checkpoint={tiny_checkpoint}",
            f"kv_cache_dtype={kv}",
            *overrides,
        ]
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["verify"]["ok"]
    assert report["peak_bytes"] > 0


def test_auto_never_takes_the_reference_on_a_gpu(tiny_checkpoint, capsys):
    assert main(["run", "device=cuda", f"checkpoint={tiny_checkpoint}"]) == 2
    assert "backend=auto found no backend for" in capsys.readouterr().err
