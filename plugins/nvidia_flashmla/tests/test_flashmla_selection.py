"""What is refused, with which words, without a GPU and without FlashMLA; which calls fit the library."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import stub_flash_mla
from dsv4_plugin_flashmla import library, plugin
from dsv4_plugin_flashmla.plugin import FlashMLAOptions

from dsv4core import libraries
from dsv4core.api import BackendUnavailable, ConfigError, Limits, PageSizes, Request
from dsv4core.framework import requirements
from dsv4core.framework.selection import select
from dsv4core.kvcache import KV_CACHE_DTYPES, accepted_dtypes, allocate_cache, cache_layout
from dsv4core.model.shapes import PRESETS, layer_spec
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite.test_calls import *  # noqa: F403

REQUEST = Request(
    platform="cuda",
    arch="sm_90",
    model=PRESETS["v4_flash"],
    num_heads=64,
    limits=Limits(64, 8, 4096, 64),
    probe="static",
)


@pytest.fixture
def dsv4() -> Subject:
    """The backend itself, whose calls are followed; nothing is computed."""
    return Subject("flashmla")


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Distributions by version, as a test wants them."""
    found = {"torch": "2.11.0"}
    for module in (library, libraries):
        monkeypatch.setattr(module, "installed", found.get)
    return found


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"arch": "sm_120"}, "arch", "It is made for sm_90 and sm_100, and this is sm_120."),
        ({"num_heads": 256}, "q-heads", "256 query heads a rank, and FlashMLA has kernels of 128 at most."),
        ({"dtype": "float32"}, "model", "Activations are float32, and FlashMLA's queries and outputs are"),
        ({"context_parallel": 2}, "parallel", "context_parallel=2, and a rank's kernels read the whole"),
        ({"host_lengths": False}, "option", "backend.prefill=gather plans workspaces by the lengths of a"),
    ],
)
def test_refusals(changes: dict[str, Any], code: str, text: str) -> None:
    options = FlashMLAOptions(prefill="gather")
    (reason,) = plugin.dsv4_unsupported_reasons(replace(REQUEST, **changes), options)
    assert reason.code == code
    assert reason.text.startswith(text)
    assert reason.fix
    assert plugin.dsv4_unsupported_reasons(REQUEST, options) == []


def test_plain_rows_are_refused() -> None:
    accepted = accepted_dtypes(KV_CACHE_DTYPES, plugin.KV_FORMATS)
    assert accepted == ["auto", "fp8", "fp8_ds_mla", "fp8_e4m3"]
    for asked in accepted:
        layout = plugin.dsv4_resolve_kv_cache(replace(REQUEST, kv_cache_dtype=asked))
        assert (layout.window.name, layout.compressed.name) == ("fp8_ds_mla", "fp8_ds_mla")
    with pytest.raises(ConfigError, match="kv_cache_dtype=bf16 is not one that backend=flashmla can store"):
        plugin.dsv4_resolve_kv_cache(replace(REQUEST, kv_cache_dtype="bf16"))


def test_plain_rows_are_refused_before_anything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both reasons at once, from a machine without a GPU."""
    monkeypatch.setattr(libraries, "installed", lambda name: None)
    monkeypatch.setattr(requirements, "_installed", lambda requirement: None)
    monkeypatch.setattr(requirements, "_importable", lambda module: False)
    with pytest.raises(BackendUnavailable) as caught:
        select(replace(REQUEST, kv_cache_dtype="bf16"), "flashmla")
    codes = [reason.code for reason in caught.value.decisions[0].reasons]
    assert codes == ["package-missing", "kv-dtype"]


def test_unknown_prefill() -> None:
    with pytest.raises(ConfigError, match="backend.prefill=paged is not known; write auto, gather or in_pl"):
        FlashMLAOptions(prefill="paged")


def test_page_strides(stub: None) -> None:
    from dsv4_plugin_flashmla import calls

    format = cache_layout(PRESETS["v4_flash"], "fp8_ds_mla", "fp8").window
    cache = allocate_cache(replace(format, page_alignment=16), 2, 61, page_stride_bytes=61 * 584 + 40)
    with pytest.raises(ConfigError, match="Pages are 35,664 bytes apart, and FlashMLA loads .* 35,712 bytes"):
        calls._rows(cache)


@pytest.mark.parametrize(
    ("torch", "command"),
    [
        (None, "pip install 'sgl-flash-mla>=1.0.0,<2'"),
        ("2.15.0", "pip install 'sgl-flash-mla>=1.0.0,<2'"),
        ("2.11.0+cu130", "pip install --no-deps 'sgl-flash-mla>=1.0.0,<2'"),
        ("2.9.1", "pip install 'torch>=2.14.1' 'sgl-flash-mla>=1.0.0,<2'"),
    ],
)
def test_the_command_is_for_the_torch_that_is_there(torch: str | None, command: str) -> None:
    assert library.flash_mla_install(torch) == command
    assert library.requirement().distribution == "sgl-flash-mla"


@pytest.mark.parametrize(
    ("torch", "wanted"),
    [("2.11.0", "==0.1.4.post1"), ("2.13.0", "==0.2.0"), ("2.14.1", ">=0.2.1.post1,<0.3")],
)
def test_deepgemm_for_the_torch_that_is_there(torch: str, wanted: str) -> None:
    assert f"sgl-deep-gemm{wanted}" in libraries.deep_gemm_install(torch)


def test_two_libraries_of_one_name(nothing_installed: dict[str, str]) -> None:
    nothing_installed |= {"sgl-flash-mla": "1.0.0", "tokenspeed-flashmla": "1.0.0.post20260429"}
    (reason,) = library.flash_mla_reasons("static")
    assert reason.code == "package-wrong"
    assert reason.text == (
        "sgl-flash-mla and tokenspeed-flashmla are installed, and both write the files of `flash_mla`."
    )
    assert "pip uninstall sgl-flash-mla tokenspeed-flashmla" in str(reason.fix)


def test_two_deepgemms(nothing_installed: dict[str, str]) -> None:
    nothing_installed |= {"sgl-deep-gemm": "0.1.4.post1", "tokenspeed-deepgemm": "2.5.0"}
    (reason,) = plugin.dsv4_unsupported_reasons(REQUEST, FlashMLAOptions())
    assert reason.text.startswith("sgl-deep-gemm and tokenspeed-deepgemm are installed, and both write")


def test_a_deepgemm_that_does_not_work(
    nothing_installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> ModuleType:
        raise AssertionError("CUDA_HOME is not set")

    nothing_installed["sgl-deep-gemm"] = "0.1.4.post1"
    assert libraries.deep_gemm_lacking("static") == ""
    monkeypatch.setattr(libraries, "import_module", broken)
    assert libraries.deep_gemm_lacking("host") == (
        "sgl-deep-gemm 0.1.4.post1 cannot be imported: AssertionError: CUDA_HOME is not set; it needs nvcc "
        "12.3 and `pip install sgl-deep-gemm==0.1.4.post1`"
    )
    monkeypatch.setattr(libraries, "import_module", ModuleType)
    assert "has no fp8_einsum, fp8_mqa_logits, " in libraries.deep_gemm_lacking("host")


def test_workspace_is_bounded_by_what_is_attended() -> None:
    """A million tokens of context are two gigabytes of gathered rows, and not of tables of all entries."""
    limits = Limits(max_tokens=8192, max_requests=64, max_model_len=1 << 20, max_query_len=8192)
    request = replace(REQUEST, limits=limits)
    plan = plugin.dsv4_plan_layer(request, layer_spec(request.model, 2), FlashMLAOptions())
    assert 1 << 30 < plan.workspace_bytes < 6 << 30


def test_a_library_of_another_torch(
    nothing_installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> ModuleType:
        raise ImportError("undefined symbol: _ZN3c10")

    nothing_installed["tokenspeed-flashmla"] = "1.0.0.post20260810"
    monkeypatch.setattr(library, "import_module", broken)
    assert not list(library.flash_mla_reasons("static"))
    (reason,) = library.flash_mla_reasons("host")
    assert (reason.code, reason.text) == (
        "package-version",
        "tokenspeed-flashmla 1.0.0.post20260810 cannot be imported with torch 2.11.0: undefined symbol: "
        "_ZN3c10.",
    )


def test_a_library_without_the_kernels(
    nothing_installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_installed["sgl-flash-mla"] = "1.0.0"
    monkeypatch.setattr(library, "import_module", lambda name: stub_flash_mla)
    assert not list(library.flash_mla_reasons("host"))
    monkeypatch.setattr(stub_flash_mla, "has_legacy", lambda: False)
    monkeypatch.setattr(stub_flash_mla, "flash_mla_sparse_fwd", lambda q, kv, indices: None)
    (reason,) = library.flash_mla_reasons("host")
    assert reason.text == (
        "sgl-flash-mla 1.0.0 has no attn_sink in flash_mla_sparse_fwd, topk_length in flash_mla_sparse_fwd, "
        "kernels for the rows of DeepSeek-V4 (has_legacy() is false)."
    )


def test_arguments_of_each_distribution() -> None:
    assert library.flavour(stub_flash_mla) == ({"use_legacy": True, "kv_format": "V4"}, {"use_legacy": True})
    assert library.flavour(ModuleType("flash_mla")) == ({}, {})


@pytest.mark.parametrize(("heads", "padded"), [(8, 64), (64, 64), (128, 128)])
def test_plans(heads: int, padded: int, nothing_installed: dict[str, str]) -> None:
    """Heads of the next kernel; what is missing is said, and how to get it."""
    model = replace(REQUEST.model, num_attention_heads=heads)
    request = replace(REQUEST, model=model, num_heads=heads)
    plan = plugin.dsv4_plan_layer(request, layer_spec(model, 0), FlashMLAOptions())
    assert plan.padded_q_heads == padded
    assert plan.variant == (
        f"{padded} heads, prefill=gather, projections and scores by the core (DeepGEMM: "
        "`pip install sgl-deep-gemm==0.1.4.post1`)"
    )
    nothing_installed["sgl-deep-gemm"] = "0.1.4.post1"
    plan = plugin.dsv4_plan_layer(request, layer_spec(model, 0), FlashMLAOptions())
    assert plan.variant.endswith("wo_a by DeepGEMM")
    assert not plan.own_ops
    indexed = plugin.dsv4_plan_layer(request, layer_spec(model, 2), FlashMLAOptions())
    assert indexed.variant.endswith("wo_a and scores by DeepGEMM")
    assert indexed.own_ops == {"index_logits"}
    paged = replace(request, page_sizes=PageSizes(context=128))
    assert not plugin.dsv4_plan_layer(paged, layer_spec(model, 2), FlashMLAOptions()).own_ops
    plan = plugin.dsv4_plan_layer(
        replace(request, host_lengths=False), layer_spec(model, 0), FlashMLAOptions()
    )
    assert "prefill=in_place" in plan.variant
