"""The backend's two kernels as the definitions have them; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dsv4_plugin_flashinfer import apply_sink, row_numbers
from dsv4_plugin_flashinfer.apply_sink import triton as sink_kernel
from dsv4_plugin_flashinfer.row_numbers import Place
from dsv4_plugin_flashinfer.row_numbers import triton as number_kernel

from dsv4core.api import CacheTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POSITIONS = torch.tensor([0, 1, 3, 126, 130, -1, 299, 700, 12], device=DEVICE)
REQUESTS = torch.tensor([0, 1, 2, 2, 0, 99, 1, 1, -3], dtype=torch.int32, device=DEVICE)
PLANNED = torch.tensor([8], dtype=torch.int32, device=DEVICE)


def table(tokens: int, page_size: int) -> CacheTable:
    """A slice of a wider table of three requests, the first of which has no pages."""
    pages = -(-tokens // page_size)
    wide = torch.randperm(3 * (pages + 5)).view(3, -1).int().to(DEVICE)
    wide[0] = -1
    return CacheTable(
        wide[:, :pages], torch.zeros(len(POSITIONS), dtype=torch.int64, device=DEVICE), page_size
    )


@pytest.mark.parametrize(("ratio", "chosen"), [(None, 0), (4, 0), (4, 24), (128, 0)])
@pytest.mark.parametrize(("window_page", "page"), [(64, 64), (61, 2)])
def test_row_numbers(window_page: int, page: int, ratio: int | None, chosen: int) -> None:
    """Requests that are none, queries that have no pages, padding; pools that lie in front of each other."""
    selected = None
    if chosen:
        visible = (POSITIONS + 1) // 4
        selected = torch.randint(0, 1 << 20, (len(POSITIONS), chosen), device=DEVICE) % visible[
            :, None
        ].clamp_min(1)
        selected = torch.where(torch.arange(chosen, device=DEVICE) < visible[:, None], selected, -1).int()
    entries = None if ratio is None else table(701 // ratio, page)
    places = (Place(0, window_page * 2 + 3, 2), Place(-1000, page * 2, 2))
    width = 128 + (chosen or (0 if ratio is None else 701 // ratio))
    arguments = (POSITIONS, REQUESTS, table(701, window_page), entries, selected, places, 128, ratio, PLANNED)
    results = []
    for module in (row_numbers.reference, number_kernel):
        numbers = torch.zeros(len(POSITIONS), width, dtype=torch.int32, device=DEVICE)
        attends = torch.full((len(POSITIONS),), 7, dtype=torch.int32, device=DEVICE)
        requests = REQUESTS.clamp(0, 2) if module is row_numbers.reference else REQUESTS
        module.row_numbers(arguments[0], requests, *arguments[2:], numbers, attends)
        results.append((numbers, attends))
    (due, attended), (found, ours) = results
    assert attended.tolist() == [0, 1, 1, 1, 0, 0, 1, 1, 0]
    assert torch.equal(ours, attended)
    for token, position in enumerate(POSITIONS.tolist()):
        entries_seen = 0 if ratio is None else (position + 1) // ratio
        count = min(position + 1, 128) + min(entries_seen, width - 128)
        if attended[token]:
            assert torch.equal(found[token, :count], due[token, :count])
        elif token in (0, 4):  # whatever is read without pages lies within the first ones
            assert int(found[token].min()) >= -1000
            assert int(found[token].max()) < 2 * 64


@pytest.mark.parametrize("heads", [1, 8, 17])
@pytest.mark.parametrize("sink", [True, False])
def test_apply_sink(heads: int, sink: bool) -> None:
    """What attends nothing becomes nothing, whatever it was; infinite sinks; a scale of values."""
    out = torch.randn(5, heads, 512, device=DEVICE).bfloat16()
    lse = torch.randn(5, heads, device=DEVICE) * 4
    attends = torch.tensor([1, 0, 1, 0, 1], dtype=torch.int32, device=DEVICE)
    out[1], lse[1], lse[3] = math.nan, math.nan, -math.inf
    sinks = torch.randn(heads, device=DEVICE) * 4 if sink else None
    if sinks is not None and heads > 2:
        sinks[0], sinks[1] = math.inf, -math.inf
    ours, our_lse, due, due_lse = out.clone(), lse.clone(), out.clone(), lse.clone()
    sink_kernel.apply_sink(ours, our_lse, attends, sinks, 0.0375)
    apply_sink.reference.apply_sink(due, due_lse, attends, sinks, 0.0375)
    assert torch.equal(our_lse, due_lse)
    assert float(due[1].abs().max()) == 0
    assert torch.isneginf(due_lse[[1, 3]]).all()
    torch.testing.assert_close(ours, due, rtol=2**-7, atol=1e-6)
    shares = [own.sink_shares(lse, attends, sinks, 0.0375) for own in (sink_kernel, apply_sink.reference)]
    torch.testing.assert_close(*shares, rtol=1e-5, atol=1e-9)
    rebuilt = torch.where(shares[0][..., None] == 0, 0.0, out.float() * shares[0][..., None])
    torch.testing.assert_close(rebuilt.bfloat16(), due, rtol=2**-7, atol=1e-6)


def test_kernels_compile() -> None:
    """For sm_90, wherever this runs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name("compile_fa3_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["_number"] * 3 + ["_share", "_apply"] * 2
