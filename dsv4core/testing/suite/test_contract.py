"""L0: the contract, which holds on any machine, without a kernel library and mostly without torch."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4core.api import (
    C4A,
    CAPABILITIES,
    ConfigError,
    KVCacheFormat,
    KVCacheLayout,
    LayerPlan,
    Limits,
    PageSizes,
    Reason,
    Request,
)
from dsv4core.framework.checks import sample_layers
from dsv4core.framework.manager import answer
from dsv4core.kvcache import INDEX_DTYPES, KV_CACHE_DTYPES, allocate_cache, check_cache
from dsv4core.model.tensors import layer_tensors
from dsv4core.testing.compare import assert_rows
from dsv4core.testing.subject import ARCHITECTURES, MODEL, REFUSABLE, Refused, Subject
from dsv4core.testing.suite.marks import check

HEAVY = ("torch", "triton", "flash_mla", "flashinfer", "deep_gemm", "aiter", "cutlass", "jax")


def at_home(subject: Subject, **changes: Any) -> Request:
    """A request that the backend is made for, answered without looking at the machine."""
    home = subject.home
    return subject.request(platform=home.platform, arch=home.arch, probe="static", **changes)


def ask(subject: Subject, hook: str, kind: type[Any], request: Request, **more: Any) -> Any:
    """What a selection hook answers."""
    return answer(subject.backend, hook, kind, request=request, options=subject.own_options, **more)


@check("L0", core=True)
def test_it_loads(dsv4: Subject) -> None:
    """All mandatory hooks are there, marked, with the arguments of the contract."""
    assert dsv4.backend.name == dsv4.name


@check("L0", core=True, reports=("llm#732", "kedro#1476"))
def test_asking_imports_no_kernels(dsv4: Subject) -> None:
    """Loading and a static selection import neither torch nor a kernel library: listing stays fast."""
    home = dsv4.home
    program = _PROGRAM.format(name=dsv4.name, platform=home.platform, arch=home.arch)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heavy = sorted(set(done.stdout.split()) & {*HEAVY, *(need.module for need in dsv4.info.requirements)})
    assert not heavy, f"Asking it imports {', '.join(heavy)}; import that in dsv4_init_layer_buffers."


_PROGRAM = """
import sys
from dsv4core.api import BackendUnavailable, Limits, Request
from dsv4core.framework.selection import select
from dsv4core.model.shapes import PRESETS
limits = Limits(max_tokens=32, max_requests=8, max_model_len=4096, max_query_len=32)
request = Request({platform!r}, {arch!r}, PRESETS["v4_flash"], 64, limits, probe="static")
try:
    select(request, {name!r})
except BackendUnavailable:
    pass
print(" ".join(sys.modules))
"""


@check("L0", core=True)
def test_info(dsv4: Subject) -> None:
    """The same each time, plain data, options with defaults."""
    info = dsv4.backend.info
    assert answer(dsv4.backend, "dsv4_backend_info", type(info)) == info
    assert pickle.loads(pickle.dumps(info)) == info
    assert "\n" not in info.summary
    options = info.options(name=dsv4.name)
    assert options.name == dsv4.name
    assert options == info.options(name=dsv4.name), "Two options with defaults differ; make it a dataclass."


@check("L0", core=True)
def test_asking_twice_gives_the_same(dsv4: Subject) -> None:
    """Reasons, formats and plans depend on request and options alone, and change neither."""
    request, options = at_home(dsv4), copy.deepcopy(dsv4.own_options)
    first, second = (_answers(dsv4, request) for _ in range(2))
    assert first == second, "Asked twice, it answers differently."
    assert dsv4.own_options == options, "Asking it changes its options."


def _answers(subject: Subject, request: Request) -> list[Any]:
    reasons = list(ask(subject, "dsv4_unsupported_reasons", object, request))
    layout = ask(subject, "dsv4_resolve_kv_cache", KVCacheLayout, request)
    plans = [
        ask(subject, "dsv4_plan_layer", LayerPlan, request, layer=layer) for layer in sample_layers(request)
    ]
    return [reasons, layout, *plans]


@check("L0", core=True, reports=("vllm#47174", "sglang#33194"))
@pytest.mark.parametrize("key", ["kv_cache_dtype", "index_dtype"])
def test_dtype_strings(dsv4: Subject, key: str) -> None:
    """A string means the first of its formats that the backend has, or an error that lists those it takes."""
    table: Mapping[str, tuple[str, ...]] = KV_CACHE_DTYPES if key == "kv_cache_dtype" else INDEX_DTYPES
    found = {asked: _resolved(dsv4, key, asked) for asked in (*table, "int3")}
    accepted = [asked for asked, answered in found.items() if not isinstance(answered, ConfigError)]
    formats = {found[asked] for asked in accepted}
    assert "auto" in accepted, f"{key}=auto is refused: {found['auto']}"
    assert "int3" not in accepted, f"{key}=int3 is accepted as {found['int3']}."
    for asked in table:
        meant = next((name for name in table[asked] if name in formats), None)
        if meant is not None:
            assert found[asked] == meant, f"{key}={asked} means {meant}, and it answers: {found[asked]}"
        else:
            assert isinstance(found[asked], ConfigError), f"{key}={asked} is replaced by {found[asked]}."
            missing = [name for name in accepted if name not in str(found[asked])]
            assert not missing, f"The error for {key}={asked} does not list {missing}: {found[asked]}"


def _resolved(subject: Subject, key: str, asked: str) -> str | ConfigError:
    """The name of the format that a string resolves to, as the tables spell it, or the error."""
    try:
        layout = ask(subject, "dsv4_resolve_kv_cache", KVCacheLayout, at_home(subject, **{key: asked}))
    except ConfigError as error:
        return error
    if key == "index_dtype":
        return str(layout.index.name.removeprefix("index_"))
    assert layout.window.name == layout.compressed.name, "Window and entries have different formats."
    return str(layout.window.name)


@check("L0", core=True, reports=("sglang#33194", "vllm#47716"))
@pytest.mark.parametrize("asked", list(KV_CACHE_DTYPES))
def test_every_format_can_be_held(dsv4: Subject, asked: str) -> None:
    """A pool of each format that it accepts can be made, and gives back what is written."""
    try:
        layout = ask(dsv4, "dsv4_resolve_kv_cache", KVCacheLayout, at_home(dsv4, kv_cache_dtype=asked))
    except ConfigError:
        return  # test_dtype_strings checks which are refused
    for name, format in {"window": layout.window, "compressed": layout.compressed}.items():
        for rows in (2, 64):
            cache = allocate_cache(format, 3, rows)
            check_cache(cache, name)
            values = torch.randn(4, MODEL.head_dim, generator=torch.Generator().manual_seed(0))
            slots = torch.tensor([0, rows - 1, rows, 3 * rows - 1])
            cache.write(slots, values)
            assert_rows(cache.read(slots)[:, None], values[:, None], _rounding(format), f"{name} row")


def _rounding(format: KVCacheFormat) -> float:
    return {"bfloat16": 2e-3, "float32": 1e-7}.get(format.parts[0].dtype, 4e-2)


@check("L0", core=True, reports=("vllm#51743", "vllm#41700"))
def test_plans(dsv4: Subject) -> None:
    """Plans name weights that a layer has, are plain data, and take no less memory for a larger step."""
    small, large = (
        at_home(
            dsv4, limits=Limits(max_tokens=tokens, max_requests=8, max_model_len=65536, max_query_len=tokens)
        )
        for tokens in (8, 8192)
    )
    for layer in sample_layers(small):
        plans = [ask(dsv4, "dsv4_plan_layer", LayerPlan, request, layer=layer) for request in (small, large)]
        assert plans[0].workspace_bytes <= plans[1].workspace_bytes, "A larger step takes less memory."
        unknown = sorted(plans[0].consumes - set(layer_tensors(MODEL, layer.kind)))
        assert not unknown, f"A {layer.kind.name} layer has no weights {unknown}, which the plan consumes."
        assert pickle.loads(pickle.dumps(plans[0])) == plans[0]


@check("L0", core=True, reports=("sglang#36390", "vllm#48277"))
def test_another_platform_is_refused(dsv4: Subject) -> None:
    """Machines that it has no kernels for."""
    others = [name for name in ("cpu", "xpu", "npu") if name not in dsv4.info.platforms]
    for platform in others:
        codes = _refusal(dsv4, dsv4.request(platform=platform, arch="", probe="static"))
        assert codes == ["platform"], f"platform={platform} is refused with {codes}, and 'platform' is due."


@check("L0", core=True, reports=("vllm#48277", "1Cat-vLLM#603"))
@pytest.mark.parametrize("platform", sorted(ARCHITECTURES))
def test_every_architecture_is_answered(dsv4: Subject, platform: str) -> None:
    """Asked from afar, it plans what it serves, and turns the others down by architecture or platform."""
    served = [arch for arch in ARCHITECTURES[platform] if _answered(dsv4, platform, arch)]
    if platform in dsv4.info.platforms:
        assert served, f"It is made for {platform}, and turns down {', '.join(ARCHITECTURES[platform])}."


def _answered(subject: Subject, platform: str, arch: str) -> bool:
    """Whether a machine is served; then its plans are there."""
    request = subject.request(platform=platform, arch=arch, probe="static")
    codes = _refusal(subject, request)
    if codes:
        assert set(codes) & {"platform", "arch"}, f"{platform} {arch} is refused with {codes} only."
        return False
    _answers(subject, request)
    return True


NEEDS: dict[str, dict[str, Any]] = {
    "kernel-seam": {"seam": "kernel"},
    "lse": {"context_parallel": 2},
    "defer-sink": {"context_parallel": 2},
    "multi-token-decode": {"decode_query_len": 4},
    "graph": {"graph": True},
    "strided-pages": {"strided_pages": True},
    "tensor-parallel": {"tensor_parallel": 2},
    "deterministic": {"deterministic": True},
}


@check("L0", core=True, reports=("sglang#36174", "local-inference-lab/vllm#56", "vllm#58069"))
@pytest.mark.parametrize("capability", NEEDS)
def test_what_is_not_declared_is_refused(dsv4: Subject, capability: str) -> None:
    """A host that needs a capability gets it, or a reason before anything is built."""
    assert capability in CAPABILITIES
    request = at_home(dsv4, **NEEDS[capability])
    codes = _refusal(dsv4, request)
    if capability in dsv4.info.capabilities:
        assert not codes or capability in ("lse", "defer-sink"), (
            f"It declares {capability!r} and refuses a request that needs it, with {codes}."
        )
    else:
        assert codes, f"It does not declare {capability!r} and accepts a request that needs it."


@check("L0", core=True)
def test_lengths_on_the_host(dsv4: Subject) -> None:
    """A host that has no lengths is refused by a backend that needs them, and by no other."""
    codes = _refusal(dsv4, at_home(dsv4, host_lengths=False))
    needs = "needs-host-lengths" in dsv4.info.capabilities
    assert ("capability" in codes) == needs, f"Without lengths on the host it is refused with {codes}."


@check("L0", core=True)
def test_a_private_output_may_be_forbidden(dsv4: Subject) -> None:
    """A host that reads the attention output gets a dense one."""
    request = at_home(dsv4, private_output=False)
    for layer in sample_layers(request):
        plan = ask(dsv4, "dsv4_plan_layer", LayerPlan, request, layer=layer)
        assert plan.output.format == "dense"


@check("L0", core=True, reports=("vllm#51254", "flashinfer#5323", "sglang#33985"))
def test_refusals_say_what_to_do(dsv4: Subject) -> None:
    """Whatever it turns down, it does so in sentences, with a code of its own, and for the request's sake."""
    for request in _unusual(dsv4):
        for reason in _reasons(dsv4, request):
            assert reason.code in REFUSABLE, f"{reason} is a defect."
            for text in filter(None, (reason.text, reason.fix)):
                assert "\n" not in text, f"{reason.code}: the reason has several lines: {text!r}."
                assert text.endswith((".", "`")), f"{reason.code}: {text!r} is no sentence."


def _unusual(subject: Subject) -> Iterator[Request]:
    for heads in (1, 3, 20, 48, 128):
        yield at_home(subject, model=replace(MODEL, num_attention_heads=heads, o_groups=1), num_heads=heads)
    for window, context in ((1, 128), (61, 128 * 61), (576, 2304 * 4)):
        yield at_home(subject, page_sizes=PageSizes(window=window, context=context))
    for asked in KV_CACHE_DTYPES:
        yield at_home(subject, kv_cache_dtype=asked)
    yield at_home(subject, dtype="float32")
    yield at_home(subject, model=replace(MODEL, head_dim=256))
    yield at_home(subject, model=replace(MODEL, sliding_window=512))
    yield at_home(subject, model=replace(MODEL, num_hidden_layers=1, layer_kinds=(replace(C4A, ratio=2),)))
    yield at_home(subject, context_parallel=2)


def _reasons(subject: Subject, request: Request) -> tuple[Reason, ...]:
    try:
        subject.select(request)
    except Refused as refused:
        return refused.reasons
    return ()


def _refusal(subject: Subject, request: Request) -> list[str]:
    """Codes of the reasons, those aside that only this machine is to blame for."""
    return [
        reason.code
        for reason in _reasons(subject, request)
        if not reason.code.startswith(("package-", "artifact-"))
    ]
