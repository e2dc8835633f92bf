"""A checkout of AITER, which `DSV4_AITER_SRC` names: its signatures, and its own Triton kernels, interpreted.

    DSV4_AITER_SRC=~/aiter pytest plugins/rocm_aiter/tests/test_aiter_source.py

AITER is not in an index in a version that could be tested, and its code is not in this repository. What is
seen here holds for that checkout, Triton's interpreter and its numbers, and for no chip.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dsv4_plugin_rocm_aiter import calls, ragged, routes
from dsv4_plugin_rocm_aiter.calls import NO_SINK, Pool
from dsv4_plugin_rocm_aiter.ragged import RaggedLists
from dsv4_plugin_rocm_aiter.routes import Symbol
from test_aiter_compiles import COMPILER, HERE, LDS

from dsv4core.kvcache import KVCache, allocate_cache, cache_layout
from dsv4core.model.shapes import PRESETS
from dsv4core.testing.signatures import Recorded, signature_of

SOURCE = os.environ.get("DSV4_AITER_SRC")
pytestmark = pytest.mark.skipif(
    SOURCE is None, reason="DSV4_AITER_SRC names no checkout of AITER (github.com/ROCm/aiter)"
)
SCALE, PAGE = 512**-0.5, 8
FORMAT = cache_layout(PRESETS["v4_flash"], "bf16", "fp8").window
KERNELS: dict[str, dict[str, set[str]]] = {
    "gfx942": {
        "_pa_decode_sparse": {"bf16"},
        "_pa_decode_sparse_reduce": set(),
        "_sparse_attn_prefill_kernel": {"bf16"},
        "_fp8_mqa_logits_kernel": {"fp8"},
    },
    "gfx950": {
        "_pa_decode_sparse": {"bf16"},
        "_pa_decode_sparse_reduce": set(),
        "_gluon_fp8_mqa_logits_kernel": {"f8f6f4"},
    },
}
"""What is launched, and what the operands of its matrix instructions are."""
SIGNATURES = Path(routes.__file__).with_name("signatures.json")


def definition(target: str) -> ast.FunctionDef | None:
    """A function or kernel of the checkout, read and not imported."""
    module, _, name = target.rpartition(".")
    file = Path(SOURCE or "") / (module.replace(".", "/") + ".py")
    if not file.exists():
        return None
    found = [own for own in ast.walk(ast.parse(file.read_text())) if isinstance(own, ast.FunctionDef)]
    return next((own for own in found if own.name == name), None)


def is_older() -> bool:
    """Whether the checkout is from before 0.1.20: it has what that version took away."""
    return any(own.before is not None and definition(own.target) is not None for own in routes.symbols())


@pytest.mark.parametrize("symbol", routes.symbols(), ids=lambda own: f"{own.op}-{own.technology}-{own.name}")
def test_the_data_is_the_checkouts(symbol: Symbol) -> None:
    """Every symbol has the parameters that are passed; one that went with a version may be gone."""
    if is_older() and symbol.since == "0.1.20":
        pytest.skip(f"the checkout is older than {symbol.since}")
    found = definition(symbol.target)
    if found is None:
        assert symbol.before is not None, f"{symbol.target} is not in {SOURCE}."
        return
    taken = set(signature_of(found.args).parameters)
    assert set(symbol.parameters) <= taken, f"{symbol.name} has no {set(symbol.parameters) - taken}."


@pytest.mark.parametrize("own", json.loads(SIGNATURES.read_text()), ids=lambda own: own["target"])
def test_what_is_recorded_is_the_checkouts(own: dict[str, str]) -> None:
    """What the plugin passes binds to both; parameters that it does not pass may differ between versions."""
    recorded = Recorded(**own)
    found = definition(recorded.target) if recorded.signature and not is_older() else None
    if found is None:
        pytest.skip(f"{recorded.target} is recorded from {recorded.distribution}, which the checkout is not")
    required = [
        name for name, value in signature_of(found.args).parameters.items() if value.default is value.empty
    ]
    assert set(required) <= set(recorded.parsed.parameters)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is a GPU's: AITER's functions ask."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


class Driver:
    """Triton's driver of a gfx942 that is not there: AITER asks for the chip when it is imported."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", "gfx942", 64)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None)

    def get_benchmarker(self) -> Any:
        def once(function: Any, quantiles: Any = None, **_: Any) -> Any:
            function()
            return [1.0] * len(quantiles or [1])

        return once

    def is_active(self) -> bool:
        return True


@pytest.fixture(scope="module")
def aiter() -> Iterator[None]:
    """AITER's Triton kernels can be imported, for gfx942, and run in Triton's interpreter."""
    from triton.runtime import driver

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AITER_TRITON_ONLY", "1")
        patch.setenv("TRITON_INTERPRET", "1")
        patch.syspath_prepend(SOURCE or "")
        for name in [own for own in sys.modules if own.partition(".")[0] == "aiter"]:
            patch.delitem(sys.modules, name)
        patch.setattr(driver, "_active", Driver())
        yield


def plain_pool(pages: int = 9) -> KVCache:
    """Rows in fp16: the interpreter multiplies bf16's bits as integers."""
    cache = allocate_cache(FORMAT, pages, PAGE)
    return KVCache(torch.randn(cache.pool.shape).half(), FORMAT)


def symbol_of(name: str, technology: str) -> Symbol:
    return next(own for own in routes.symbols() if (own.name, own.technology) == (name, technology))


def named(tokens: int, least: int) -> tuple[torch.Tensor, RaggedLists]:
    """Slots with holes, none in the last row; the lists of them."""
    slots = torch.randint(-20, 9 * PAGE, (tokens, 37)).clamp_min(-1).int()
    slots[-1] = -1
    room = RaggedLists.empty(tokens, 37, torch.device("cpu"))
    return slots, ragged.ragged_lists(slots, None, None, least, room)


def due(q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention by hand, in fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for token, own in enumerate(slots):
        keys = rows[own[own >= 0].long()].double()
        scores = torch.cat([q[token].double() @ keys.T * SCALE, sinks[:, None].double()], 1)
        out[token] = scores.softmax(1)[:, :-1] @ keys
    return out


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-3) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert bool((found[-1] == 0).all()), "A query that names nothing gives exact 0."


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("heads", [8, 24])
def test_the_portable_decode(aiter: None, heads: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plugin calls it: holes, a query of nothing, sinks of minus infinity, one part and several."""
    monkeypatch.setattr(calls, "splits", lambda tokens, heads: splits)
    cache, (slots, lists) = plain_pool(), named(3, 1)
    q, sinks = torch.randn(3, heads, 512).half(), torch.randn(heads)
    sinks[::3] = NO_SINK
    symbol = symbol_of("pa_decode_sparse", "triton")
    found = calls.DECODES[symbol.name](symbol, q.as_subclass(OnGpu), [Pool(cache, lists)], SCALE, sinks)
    assert_near(found.as_subclass(torch.Tensor), due(q, cache.pool.flatten(0, 1), slots, sinks))


@pytest.mark.parametrize("heads", [8, 40])
def test_the_prefill_kernel(aiter: None, heads: int) -> None:
    """The kernel itself, tuned as AITER tunes it; empty lists stay empty."""
    rows, (slots, lists) = torch.randn(9 * PAGE, 512).half(), named(3, 0)
    q, sinks = torch.randn(3, heads, 512).half(), torch.randn(heads)
    sinks[::3] = NO_SINK
    found = calls.prefill_kernel(q, rows, lists, SCALE, sinks)
    assert_near(found, due(q, rows, slots, sinks))


def test_the_prefill_before_0_1_20(aiter: None) -> None:
    """The entry of 0.1.18 and 0.1.19, whose result is bf16."""
    if not is_older():
        pytest.skip("the checkout has no sparse_attn_prefill")
    rows, (slots, lists) = torch.randn(9 * PAGE, 512).half(), named(3, 0)
    q, sinks = torch.randn(3, 24, 512).half(), torch.randn(24)
    own = RaggedLists(lists.indices.as_subclass(OnGpu), lists.starts.as_subclass(OnGpu))
    found = calls.prefill_ragged(q.as_subclass(OnGpu), rows.as_subclass(OnGpu), own, SCALE, sinks)
    assert_near(found.as_subclass(torch.Tensor), due(q, rows, slots, sinks), 2**-6)


def test_scores_of_prompts(aiter: None) -> None:
    """OCP codes, which gfx942's branch turns into FNUZ's of half the value."""
    from dsv4core import ops
    from dsv4core.api import CacheTable

    keys = allocate_cache(cache_layout(PRESETS["v4_flash"], "bf16", "fp8").index, 4, 64)
    keys.write(torch.arange(256), torch.randn(256, 128))
    q, weights = torch.randn(5, 64, 128).to(torch.float8_e4m3fn), torch.randn(5, 64)
    visible, pages = torch.tensor([1, 64, 65, 130, 190]), torch.tensor([[2, 0, 3]], dtype=torch.int32)
    found = calls.prompt_logits(q, weights, keys, pages[0], visible)
    table, requests = CacheTable(pages, visible, 64), torch.zeros(5, dtype=torch.int32)
    expected = ops.index_logits(q, weights, keys, table, requests, visible, 192)
    for token, count in enumerate(visible.tolist()):
        torch.testing.assert_close(found[token, :count], expected[token, :count], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("chip", routes.ARCHITECTURES)
def test_its_kernels_compile(chip: str) -> None:
    """Those of Triton and Gluon that the plugin calls, within the chip's LDS, on the right matrix units."""
    if is_older():
        pytest.skip("the checkout is older than 0.1.20, whose kernels these are")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"AITER_TRITON_ONLY": "1", "PYTHONPATH": os.pathsep.join([SOURCE or "", *sys.path])}
    command = [sys.executable, str(COMPILER), chip, str(HERE / "aiter_launches.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("_")]
    assert {kernel for kernel, *_ in lines} == KERNELS[chip].keys()
    for kernel, shared, *products in lines:
        assert int(shared) <= LDS[chip], f"{kernel} has no room on {chip}: {shared} bytes."
        operands = {product.rpartition("_")[2] for product in products}
        assert operands == KERNELS[chip][kernel], f"{kernel} multiplies with {products}."


@pytest.mark.xfail(strict=True, reason="pa_decode_sparse with one part writes nothing for an empty list")
def test_an_empty_list(aiter: None) -> None:
    from aiter.ops.triton.attention import pa_decode_sparse as module

    q, rows = torch.randn(2, 8, 512).half().as_subclass(OnGpu), torch.randn(4, 512).half()
    starts = torch.tensor([0, 2, 2], dtype=torch.int32)
    indices = torch.tensor([1, 3], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.torch, "empty_like", torch.ones_like)  # what memory held
        out = module.pa_decode_sparse(q, rows, indices, starts, torch.zeros(8), SCALE, kv_splits=1)
    assert bool((out[1] == 0).all())


@pytest.mark.xfail(
    strict=True, raises=RuntimeError, reason="pa_prefill_sparse takes the truth of a tensor of sinks"
)
def test_the_portable_prefill(aiter: None) -> None:
    if is_older():
        pytest.skip("the checkout is older than 0.1.20, where it is for gfx1250 alone")
    from aiter.ops.triton.attention.pa_prefill_sparse import pa_prefill_sparse

    rows, (_, lists) = torch.randn(9 * PAGE, 512).half(), named(3, 0)
    q = torch.randn(3, 16, 512).half()
    pa_prefill_sparse(q, rows, lists.indices, lists.starts, None, None, None, torch.zeros(16), SCALE)
