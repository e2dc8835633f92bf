"""Where vLLM makes its layers: ours if asked, its own if not, and never its own in silence."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from dsv4_vllm.drift import DriftError
from graph_mode import GraphMode

from dsv4core.api import ConfigError, DSV4Error, OutputSpec

REFERENCE = {"backend": "reference"}
PLATFORMS = ("cpu", "amd", "nvidia")


def make_layer(platform: str, vllm_config: Any) -> Any:
    return import_module(f"vllm.models.deepseek_v4.{platform}.model").make_layer(
        vllm_config, "model.layers.0.attn"
    )


def is_ours(layer: Any) -> bool:
    return hasattr(layer, "_dsv4_host")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nothing_changes_when_it_is_not_asked_for(vllm: None, config: Any, platform: str) -> None:
    layer = make_layer(platform, config())
    assert not is_ours(layer)
    assert type(layer).__module__.startswith("vllm.models")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_ours_if_asked(vllm: None, config: Any, platform: str) -> None:
    layer = make_layer(platform, config(REFERENCE))
    assert is_ours(layer)
    assert layer._dsv4_host.selection.backend.name == "reference"
    assert layer._dsv4_host.selection.asked == "reference"


def test_a_class_that_is_replaced_still_knows_its_instances(vllm: None, config: Any) -> None:
    model = import_module("vllm.models.deepseek_v4.amd.model")
    for vllm_config in (config(), config(REFERENCE)):
        assert model.is_own(make_layer("amd", vllm_config))
    assert not model.is_own(make_layer("cpu", config()))


def test_layers_of_one_configuration_share_one_selection(vllm: None, config: Any) -> None:
    vllm_config = config(REFERENCE)
    first, second = (make_layer("cpu", vllm_config) for _ in range(2))
    assert type(first) is type(second)
    assert make_layer("cpu", config(REFERENCE))._dsv4_host is not first._dsv4_host


def test_installing_twice_changes_nothing(vllm: None, config: Any) -> None:
    from dsv4_vllm.seams import SEAMS

    model = import_module("vllm.models.deepseek_v4.cpu.model")
    before = model.DeepseekV4CPUAttention
    for name, install in SEAMS.items():
        install(import_module(name))
    assert model.DeepseekV4CPUAttention is before


def test_a_seam_that_is_missing_is_no_silent_default(vllm: None, config: Any) -> None:
    sparse = import_module("vllm.models.deepseek_v4.cpu.cpu_sparse")
    sparse.DeepseekV4CPUAttention(config(), "model.layers.0.attn")
    with pytest.raises(DriftError) as caught:
        sparse.DeepseekV4CPUAttention(config(REFERENCE), "model.layers.0.attn")
    assert str(caught.value) == (
        "vLLM made a layer of vllm.models.deepseek_v4.cpu.cpu_sparse.DeepseekV4CPUAttention although "
        'additional_config["dsv4"] asks for dsv4core: dsv4-vllm has no seam there. It serves the CPU, '
        "CUDA and ROCm models of DeepSeek-V4 in vLLM 0.32; take it out to use vLLM's own."
    )


MISTAKES = [
    ("reference", 'additional_config["dsv4"]=\'reference\' is no mapping; write {"backend": "NAME"}.'),
    ({}, 'additional_config["dsv4"]["backend"]=None is no name; write "auto" or one.'),
    ({"backend": ""}, 'additional_config["dsv4"]["backend"]=\'\' is no name; write "auto" or one.'),
    ({"backnd": "x"}, "additional_config[\"dsv4\"] has no key 'backnd'; its keys are backend, options."),
    (
        {"backend": "reference", "options": [1]},
        'additional_config["dsv4"]["options"]=[1] is no mapping; write {"NAME": VALUE}.',
    ),
    (
        {"backend": "reference", "options": {"split": 2}},
        "backend=reference has no option 'split'; it takes none.",
    ),
    (
        {"backend": "auto", "options": {"split": 2}},
        'additional_config["dsv4"]["options"] belong to a named backend; name it.',
    ),
    (
        {"backend": "acme"},
        "backend=acme cannot run this request: [package-missing] Backend 'acme' is not installed. "
        "Run `pip install dsv4-plugin-acme`. What could run here, if you name it: ",
    ),
]


@pytest.mark.parametrize(("given", "text"), MISTAKES)
def test_mistakes_end_in_one_line(vllm: None, config: Any, absent: str, given: object, text: str) -> None:
    with pytest.raises(DSV4Error) as caught:
        make_layer("cpu", config(given))
    assert str(caught.value).startswith(text)  # what else is installed is named behind it
    assert "\n" not in str(caught.value)


def test_a_cache_that_vllm_does_not_write(vllm: None, config: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make_layer("cpu", config(REFERENCE, cache_config__cache_dtype="bfloat16"))
    assert str(caught.value) == (
        "backend=reference reads bf16 caches, and vLLM writes fp8_ds_mla here; set kv_cache_dtype=fp8, or "
        "choose another backend."
    )


def test_what_is_asked_of_the_backend(vllm: None, config: Any) -> None:
    request = make_layer("cpu", config(REFERENCE))._dsv4_host.request
    assert (request.seam, request.strided_pages, request.private_output) == ("kernel", True, False)
    assert (request.page_sizes.window, request.page_sizes.context) == (64, 256)
    assert (request.limits.max_tokens, request.limits.max_requests) == (512, 4)
    assert (request.num_heads, request.dtype, request.platform) == (8, "bfloat16", "cpu")


def test_graphs_are_asked_for_where_vllm_captures_whole_steps(vllm: None, config: Any) -> None:
    piecewise = config(REFERENCE, compilation_config__cudagraph_mode=GraphMode("PIECEWISE", "PIECEWISE"))
    assert is_ours(make_layer("cpu", piecewise))
    with pytest.raises(DSV4Error, match="needs 'graph'"):
        make_layer("cpu", config(REFERENCE, compilation_config__cudagraph_mode=GraphMode("FULL", "NONE")))


NOT_SERVED = [
    (
        {"speculative_config": object()},
        "dsv4-vllm does not serve speculative decoding yet; leave speculative_config out.",
    ),
    (
        {"parallel_config__use_ubatching": True},
        "dsv4-vllm does not serve dual batch overlap; leave enable_dbo out.",
    ),
    (
        {"compilation_config__cudagraph_mode": GraphMode("FULL", "FULL")},
        "cudagraph_mode=FULL captures prefills as if they were decodes, and backends plan those differently; "
        "set FULL_DECODE_ONLY or FULL_AND_PIECEWISE.",
    ),
]


@pytest.mark.parametrize(("changes", "text"), NOT_SERVED)
def test_what_is_not_served_is_told_at_the_start(
    vllm: None, config: Any, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_layer("nvidia", config(REFERENCE, **changes))
    assert str(caught.value) == text


def test_images_are_not_served(vllm: None, config: Any) -> None:
    vllm_config = config(REFERENCE)
    vllm_config.model_config.hf_config.vision_n_layers = 2
    with pytest.raises(ConfigError) as caught:
        make_layer("nvidia", vllm_config)
    assert str(caught.value) == "dsv4-vllm does not serve images, whose tokens see each other both ways."


def test_a_class_that_writes_plain_rows_is_refused(
    vllm: None, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashmla = import_module("vllm.models.deepseek_v4.nvidia.flashmla")
    monkeypatch.setattr(flashmla.DeepseekV4FlashMLAAttention, "use_fp8_ds_mla_layout", False)
    with pytest.raises(ConfigError) as caught:
        make_layer("nvidia", config(REFERENCE))
    assert str(caught.value) == (
        "vLLM chose DeepseekV4FlashMLAAttention, which writes plain rows, and dsv4-vllm hands over packed "
        "pages; set attention_config.backend to FLASHMLA_SPARSE_DSV4."
    )


PLANS = [
    ("q_dtype", "float8_e4m3fn", "wants q of another dtype than vLLM's bfloat16"),
    ("output", OutputSpec(inverse_rotated=True), "rotates its output back, and so does vLLM"),
]


@pytest.mark.parametrize(("field", "value", "text"), PLANS)
def test_plans_that_vllm_cannot_follow(
    vllm: None, config: Any, monkeypatch: pytest.MonkeyPatch, field: str, value: object, text: str
) -> None:
    from dsv4_vllm import choice

    def select(*arguments: Any) -> Any:
        selection = original(*arguments)
        changed: dict[str, Any] = {field: value}
        plans = {name: replace(plan, **changed) for name, plan in selection.plans.items()}
        return replace(selection, plans=plans)

    original = choice.select
    monkeypatch.setattr(choice, "select", select)
    with pytest.raises(ConfigError) as caught:
        make_layer("cpu", config(REFERENCE))
    assert str(caught.value) == f"backend=reference {text}; choose another one."


def test_codes_of_another_flavour_are_refused(
    vllm: None, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = import_module("vllm.platforms").current_platform
    monkeypatch.setattr(type(platform), "fp8_dtype", classmethod(lambda cls: torch.float8_e4m3fnuz))
    with pytest.raises(ConfigError) as caught:
        make_layer("amd", config(REFERENCE))
    assert str(caught.value) == (
        "backend=reference reads a window cache of e4m3fn codes, and vLLM writes e4m3fnuz on this machine; "
        "choose another one."
    )


def test_auto_that_finds_nothing_says_so_in_one_line(
    vllm: None, config: Any, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsv4_vllm import choice

    select = choice.select
    monkeypatch.setattr(choice, "select", lambda request: select(request, order={"cpu": [absent]}))
    with pytest.raises(ConfigError) as caught:
        make_layer("cpu", config({"backend": "auto"}))
    text = str(caught.value)
    assert text.startswith(
        'additional_config["dsv4"]["backend"]="auto" found none that can run this (acme: [package-missing'
    )
    assert text.endswith("; name one.")
    assert "\n" not in text


def test_deepseek_v41_is_no_silent_default(vllm: None, config: Any) -> None:
    attention = import_module("vllm.models.deepseek_v41.attention")
    attention.DeepseekV4Attention(config(), "model.layers.0.attn")
    with pytest.raises(DriftError, match=r"vLLM made a layer of vllm\.models\.deepseek_v41"):
        attention.DeepseekV4Attention(config(REFERENCE), "model.layers.0.attn")


def test_pages_are_checked_when_vllm_has_settled_them(vllm: None, config: Any) -> None:
    vllm_config = config(REFERENCE)
    layer = make_layer("cpu", vllm_config)
    assert layer.get_kv_cache_spec(vllm_config) is None
    layer.compressor = object()
    with pytest.raises(ConfigError) as caught:
        layer.get_kv_cache_spec(vllm_config)
    assert str(caught.value) == (
        "vLLM's pages stand for 16 tokens, and the backend was asked about 256; set block_size=256."
    )
    vllm_config.cache_config.block_size = 256
    assert layer.get_kv_cache_spec(vllm_config).block_size == 256


def test_the_users_block_size_is_taken(vllm: None, config: Any) -> None:
    own = config(REFERENCE, cache_config__block_size=512, cache_config__user_specified_block_size=True)
    assert make_layer("cpu", own)._dsv4_host.request.page_sizes.context == 512


def test_the_choice_is_logged_by_kind(vllm: None, config: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vllm.dsv4")
    make_layer("cpu", config(REFERENCE))
    assert [text.split(" (")[0] for text in caplog.messages] == [
        "dsv4: 1 layer of kind swa on reference",
        "dsv4: 2 layers of kind c4a on reference",
        "dsv4: 1 layer of kind c128a on reference",
    ]
    assert caplog.messages[0].endswith("variant torch: as asked.")
