"""Who does what, case by case: chip, version, cached rows, pools, and a symbol that is not there."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from dsv4_plugin_rocm_aiter import library, routes
from dsv4_plugin_rocm_aiter.library import Aiter
from dsv4_plugin_rocm_aiter.routes import OPERATIONS, Asked

from dsv4core.testing.signatures import Recorded

SCALE = 512**-0.5
OLD = ("0.1.7.post2.dev18", "0.1.17")
BEFORE = ("0.1.18", "0.1.19.post2", "0.1.20.dev1+g1a2b")
NEW = ("0.1.20", "0.1.20.post1", "0.1.20.post2.dev7+g1a2b3c4", "0.1.22+rocm7.2")
EVERYWHERE = {"index_logits": "fp8_mqa_logits"}
DUE = {
    ("gfx942", False): EVERYWHERE | {"prefill": "sparse_attn_prefill"},
    ("gfx942", True): EVERYWHERE
    | {"prefill": "_sparse_attn_prefill_kernel", "index_topk": "top_k_per_row_prefill"},
    ("gfx950", False): EVERYWHERE | {"prefill": "pa_sparse_prefill_opus"},
    ("gfx950", True): EVERYWHERE
    | {
        "prefill": "pa_sparse_prefill_opus",
        "index_topk": "top_k_per_row_prefill",
        "decode": "pa_decode_sparse",
        "inverse_rope_quant": "inverse_rope_group_quant",
        "o_proj": "batched_gemm_a8w8_mxscale",
    },
}
"""Symbols by chip, and whether AITER is 0.1.20 or newer; what is not named is the core's."""


def asked(arch: str, layout: str = "fp8_ds_mla", pools: int = 2, heads: int = 8, **more: object) -> Asked:
    return replace(Asked(arch, layout, "index_fp8", pools, heads, SCALE), **more)  # type: ignore[arg-type]


def taken(own: Asked, aiter: Aiter) -> dict[str, str]:
    found = routes.routes(own, aiter)
    assert tuple(found) == OPERATIONS
    return {op: route.symbol.name for op, route in found.items() if route.symbol is not None}


@pytest.mark.parametrize("pools", [1, 2])
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("version", [None, "unknown build", *OLD, *BEFORE, *NEW])
@pytest.mark.parametrize("arch", routes.ARCHITECTURES)
def test_every_case(arch: str, version: str | None, layout: str, pools: int) -> None:
    due = dict(DUE[arch, version in NEW]) if version in (*BEFORE, *NEW) else {}
    if arch == "gfx942" and version in NEW and (layout, pools) == ("bf16", 1):
        due["decode"] = "pa_decode_sparse"
    assert taken(asked(arch, layout, pools), Aiter(version)) == due


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1100", "gfx1201", "gfx1250"])
def test_other_chips_have_none(arch: str) -> None:
    assert taken(asked(arch), Aiter("0.1.22")) == {}


@pytest.mark.parametrize("arch", routes.ARCHITECTURES)
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16"])
def test_a_symbol_that_is_not_there(arch: str, layout: str) -> None:
    """The core does its operation; two that belong together are both the core's."""
    whole = taken(asked(arch, layout, 1), Aiter("0.1.20"))
    for op, name in whole.items():

        def missing(target: str, parameters: tuple[str, ...], name: str = name) -> str:
            assert parameters
            return "has no q" if target.endswith(f".{name}") else ""

        aiter = Aiter("0.1.20", missing=missing)
        without = {op, *(routes.TOGETHER if op in routes.TOGETHER else ())}
        assert taken(asked(arch, layout, 1), aiter) == {
            other: own for other, own in whole.items() if other not in without
        }
        route = routes.routes(asked(arch, layout, 1), aiter)[op]
        assert any(re.fullmatch(rf"{name} \(\w+\) has no q", why) for why in route.passed_over)
        assert str(route).startswith(f"{op} by the core; ")


@pytest.mark.parametrize("arch", routes.ARCHITECTURES)
def test_triton_only(arch: str) -> None:
    """AITER_TRITON_ONLY=1 leaves HIP, OPUS, assembly and FlyDSL out."""
    found = routes.routes(asked(arch, "bf16", 1), Aiter("0.1.20", triton_only=True))
    kinds = {route.symbol.technology for route in found.values() if route.symbol is not None}
    assert kinds <= {"triton", "gluon"}
    assert "top_k_per_row_prefill (hip) is left out by AITER_TRITON_ONLY=1" in found["index_topk"].passed_over


def test_opus_and_assembly_are_for_gfx950() -> None:
    """Elsewhere they raise at their first call, and an import succeeds."""
    for version in NEW:
        for layout in ("fp8_ds_mla", "bf16", "two buffers"):
            for route in routes.routes(asked("gfx942", layout), Aiter(version)).values():
                assert route.symbol is None or route.symbol.technology in ("triton", "hip")
    passed = routes.route("prefill", asked("gfx942"), Aiter("0.1.20")).passed_over
    assert passed[0] == "pa_sparse_prefill_opus (opus) is for gfx950"


def test_the_assembly_kernel() -> None:
    """It has 16 heads or more, and the scale of heads of 512: heads are padded for it alone."""
    own, aiter = asked("gfx950", "two buffers", 1), Aiter("0.1.20")
    route = routes.route("decode", own, aiter)
    assert (route.symbol and route.symbol.name, route.heads) == ("mla_decode_fwd_v4_nm", 16)
    assert routes.route("decode", replace(own, heads=64), aiter).heads == 64
    other = routes.route("decode", replace(own, softmax_scale=0.1), aiter)
    assert other.symbol is None
    assert other.passed_over[0] == "mla_decode_fwd_v4_nm (asm) has a fixed softmax scale of 0.0441942"
    for layout in ("fp8_ds_mla", "bf16"):
        route = routes.route("decode", asked("gfx950", layout), aiter)
        assert (route.symbol and route.symbol.name, route.heads) == ("pa_decode_sparse", 8)
        assert route.passed_over == ("mla_decode_fwd_v4_nm (asm) is for rows of two buffers",)


def test_the_portable_decode() -> None:
    """One pool whose pages lie side by side, with offsets of 64 bits: AITER 0.1.20's."""
    own, aiter = asked("gfx942", "bf16", 1), Aiter("0.1.20")
    assert routes.route("decode", own, aiter).symbol is not None
    for changes, why in (
        ({"pools": 2}, "attends one pool, and this layer has two"),
        ({"strided": True}, "reads pages side by side, and the host's are apart"),
        ({"layout": "fp8_ds_mla"}, "is for rows of bf16"),
    ):
        route = routes.route("decode", replace(own, **changes), aiter)  # type: ignore[arg-type]
        assert route.symbol is None
        assert route.passed_over[-1] == f"pa_decode_sparse (triton) {why}"
    before = routes.route("decode", own, Aiter("0.1.19.post2"))
    assert before.passed_over[-1] == "pa_decode_sparse (triton) needs amd-aiter 0.1.20"


def test_the_defective_prefill_is_never_called() -> None:
    for arch in routes.ARCHITECTURES:
        route = routes.route("prefill", asked(arch), Aiter("0.1.20", missing=lambda target, own: ""))
        assert route.symbol is not None
        assert route.symbol.name != "pa_prefill_sparse"
    (refused,) = (symbol for symbol in routes.symbols() if symbol.refused)
    assert refused.name == "pa_prefill_sparse"


def test_other_keys_and_what_the_user_leaves() -> None:
    found = routes.routes(asked("gfx950", core=frozenset({"prefill", "o_proj"})), Aiter("0.1.20"))
    assert str(found["prefill"]) == "prefill by the core; backend.core has prefill"
    assert found["inverse_rope_quant"].passed_over == (
        "inverse_rope_group_quant (hip) needs o_proj to be AITER's",
    )
    plain = routes.route("index_logits", asked("gfx950", index_layout="index_bf16"), Aiter("0.1.20"))
    assert plain.passed_over[-1] == "fp8_mqa_logits (triton) is for rows of index_fp8"


def test_the_data() -> None:
    """What is passed is what the recorded signatures take; every symbol is of an operation."""
    file = Path(routes.__file__).with_name("signatures.json")
    recorded = {own["target"]: Recorded(**own) for own in json.loads(file.read_text()) if own["signature"]}
    for symbol in routes.symbols():
        assert symbol.op in OPERATIONS
        assert set(symbol.archs) <= set(routes.ARCHITECTURES)
        assert library.fits("0.1.20", symbol.since, None), symbol.name
        if symbol.target in recorded and not symbol.refused:
            assert set(symbol.parameters) <= set(recorded[symbol.target].parsed.parameters), symbol.name
    taken_targets = {symbol.target for symbol in routes.symbols()}
    assert set(recorded) <= taken_targets
