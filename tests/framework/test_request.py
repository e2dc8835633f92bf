from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsv4core.api import BackendOptions, BackendUnavailable, ConfigError, Limits, PageSizes, Request
from dsv4core.config import AutoOptions, DSV4Config, PageSizesOptions, PluginsOptions, RequestOptions
from dsv4core.framework.platform import Machine
from dsv4core.framework.request import build_limits, build_request, select_configured
from dsv4core.model.shapes import PRESETS
from dsv4core.testing.fakes import install_backend

TINY = PRESETS["tiny"]
CPU = Machine("cpu", "", "")


def test_limits() -> None:
    assert build_limits(DSV4Config(prefill=300, decode=16, batch=2, chunk=256)) == Limits(512, 2, 316, 256)
    assert build_limits(DSV4Config(prefill=100, decode=1, batch=3, chunk=256)) == Limits(300, 3, 101, 100)
    assert build_limits(DSV4Config(prefill=0, decode=4, batch=3)) == Limits(3, 3, 4, 1)


def test_request_takes_what_the_user_wrote() -> None:
    asked = RequestOptions(
        tensor_parallel=4, page_sizes=PageSizesOptions(window=32), graph=True, seam="kernel"
    )
    config = DSV4Config(kv_cache_dtype="fp8", index_dtype="fp32", dtype="float32", request=asked)
    request = build_request(config, TINY, Machine("cuda", "sm_90", ""), probe="static")
    assert request == Request(
        platform="cuda",
        arch="sm_90",
        model=TINY,
        num_heads=TINY.num_attention_heads // 4,
        limits=build_limits(config),
        kv_cache_dtype="fp8",
        index_dtype="fp32",
        dtype="float32",
        page_sizes=PageSizes(window=32),
        tensor_parallel=4,
        graph=True,
        seam="kernel",
        probe="static",
    )


FIELDS = {
    "strided_pages": True,
    "decode_query_len": 3,
    "context_parallel": 2,
    "private_output": False,
    "host_lengths": False,
    "deterministic": True,
}


@pytest.mark.parametrize(("name", "value"), FIELDS.items())
def test_every_field_of_a_request_can_be_asked_for(name: str, value: object) -> None:
    config = DSV4Config(request=RequestOptions(**{name: value}))  # type: ignore[arg-type]
    usual = build_request(DSV4Config(), TINY, CPU, probe="host")
    assert build_request(config, TINY, CPU, probe="host") == replace(usual, **{name: value})  # type: ignore[arg-type]


def test_the_options_of_a_request_have_the_contracts_defaults() -> None:
    usual = build_request(DSV4Config(), TINY, CPU, probe="host")
    assert usual == Request("cpu", "", TINY, TINY.num_attention_heads, build_limits(DSV4Config()))


def test_heads_must_be_shared_evenly() -> None:
    config = DSV4Config(request=RequestOptions(tensor_parallel=3))
    with pytest.raises(ConfigError, match="3 does not divide num_attention_heads = 16"):
        build_request(config, TINY, CPU, probe="static")


def test_select_configured(folder: Path) -> None:
    install_backend(folder, "acme")
    install_backend(folder, "other")
    order = AutoOptions(order={"cpu": ["acme", "other"]})
    auto = DSV4Config(backend=order, plugins=PluginsOptions(disable=["acme"]))
    request = build_request(auto, TINY, CPU, probe="host")
    chosen = select_configured(auto, request)
    assert chosen.backend.name == "other"
    options: BackendOptions = chosen.backend.info.options(name="other")
    named = select_configured(DSV4Config(backend=options), request)
    assert named.options is options
    with pytest.raises(BackendUnavailable, match=r"Take 'fake-other' out of plugins\.disable"):
        select_configured(DSV4Config(options, plugins=PluginsOptions(["fake-other"])), request)
