from __future__ import annotations

from pathlib import Path

import pytest

from dsv4core.api import BackendOptions, ConfigError, Limits
from dsv4core.config import AutoOptions, DSV4Config
from dsv4core.framework.request import build_limits, build_request, select_configured
from dsv4core.model.shapes import PRESETS
from dsv4core.testing.fakes import install_backend

TINY = PRESETS["tiny"]


def test_limits() -> None:
    assert build_limits(DSV4Config(prefill=300, decode=16, batch=2, chunk=256)) == Limits(512, 2, 316, 256)
    assert build_limits(DSV4Config(prefill=100, decode=1, batch=3, chunk=256)) == Limits(300, 3, 101, 100)
    assert build_limits(DSV4Config(prefill=0, decode=4, batch=3)) == Limits(3, 3, 4, 1)


def test_request_takes_what_the_user_wrote() -> None:
    config = DSV4Config(kv_cache_dtype="fp8", index_dtype="fp32", dtype="float32")
    limits = build_limits(config)
    request = build_request(config, TINY, limits, "cuda", "sm_90", tensor_parallel=4, probe="static")
    assert (request.platform, request.arch, request.probe) == ("cuda", "sm_90", "static")
    assert (request.kv_cache_dtype, request.index_dtype, request.dtype) == ("fp8", "fp32", "float32")
    assert (request.num_heads, request.tensor_parallel) == (TINY.num_attention_heads // 4, 4)
    assert request.model is TINY
    assert request.limits is limits


def test_heads_must_be_shared_evenly() -> None:
    config = DSV4Config()
    with pytest.raises(ConfigError, match="3 does not divide num_attention_heads = 16"):
        build_request(config, TINY, build_limits(config), "cpu", "", tensor_parallel=3)


def test_select_configured(folder: Path) -> None:
    install_backend(folder, "acme")
    install_backend(folder, "other")
    auto = DSV4Config(backend=AutoOptions(order={"cpu": ["acme", "other"]}, exclude=["acme"]))
    request = build_request(auto, TINY, build_limits(auto), "cpu", "")
    chosen = select_configured(auto, request)
    assert chosen.backend.name == "other"
    options: BackendOptions = chosen.backend.info.options(name="other")
    named = select_configured(DSV4Config(backend=options), request)
    assert named.options is options
