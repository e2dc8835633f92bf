"""FA3 on sm_90: what it needs, what it refuses, and how its plans follow steps."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import stub_flashinfer
import torch
from dsv4_plugin_flashinfer import library, plugin
from dsv4_plugin_flashinfer.plugin import FlashInferOptions

from dsv4core.api import C4A, C128A, SWA, ConfigError, LayerKind, LayerScales, Limits, Request
from dsv4core.model.shapes import PRESETS, layer_spec
from dsv4core.testing.case import Case
from dsv4core.testing.compare import assert_attention
from dsv4core.testing.host import Host
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import test_attention

REQUEST = Request(
    platform="cuda",
    arch="sm_90",
    model=PRESETS["v4_flash"],
    num_heads=17,
    limits=Limits(64, 8, 4096, 64),
    probe="static",
)
SPEC = replace(layer_spec(REQUEST.model, 2), num_heads=17)
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Pools of a GPU lie near each other.")


def test_capabilities() -> None:
    info = plugin.dsv4_backend_info()
    assert info.on("sm_90").capabilities - info.capabilities == plugin.FA3_CAPABILITIES
    assert info.on("sm_100").capabilities == info.capabilities
    assert plugin.dsv4_unsupported_reasons(REQUEST, FlashInferOptions()) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_plans(dtype: str) -> None:
    """Heads and queries as they are, whatever rows are."""
    plan = plugin.dsv4_plan_layer(replace(REQUEST, kv_cache_dtype=dtype), SPEC, FlashInferOptions())
    assert (plan.engine, plan.padded_q_heads, plan.q_dtype, plan.prepares) == ("fa3", 17, "bfloat16", True)
    elsewhere = plugin.dsv4_plan_layer(replace(REQUEST, arch="sm_100"), SPEC, FlashInferOptions())
    assert (elsewhere.engine, elsewhere.prepares) == ("trtllm-gen", False)


@pytest.mark.parametrize(
    ("changes", "format"),
    [({}, "private"), ({"seam": "kernel"}, "dense"), ({"private_output": False}, "dense")],
)
def test_sinks_wait_for_the_projection(
    changes: dict[str, str], format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By DeepGEMM, of a host that leaves attention's output to the backend."""
    monkeypatch.setattr(plugin.libraries, "deep_gemm_lacking", lambda probe: "")
    request = replace(REQUEST, **changes)  # type: ignore[arg-type]
    assert plugin.dsv4_plan_layer(request, SPEC, FlashInferOptions()).output.format == format


@pytest.fixture
def with_library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """FlashInfer 0.6.18 is there, with tools."""
    module = stub_flashinfer.modules()["flashinfer.mla"]
    monkeypatch.setattr(library, "installed", {library.DISTRIBUTION: "0.6.18.post1"}.get)
    monkeypatch.setattr(library, "import_module", lambda name: module)
    monkeypatch.setattr(library.shutil, "which", lambda name: f"/usr/bin/{name}")
    return module


def test_a_library_that_fits(with_library: ModuleType) -> None:
    assert list(library.reasons("host", "sm_90", "fa3", strided=True)) == []


def test_a_library_of_later_plans(with_library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed", {library.DISTRIBUTION: "0.7.4"}.get)
    (reason,) = library.reasons("host", "sm_90", "fa3", strided=False)
    assert (reason.code, reason.text) == (
        "package-version",
        "flashinfer-python 0.7.4 is not one of >=0.6.18,<0.7, whose plans take the scales of several layers.",
    )
    assert reason.fix == "Run `pip install 'flashinfer-python>=0.6.18,<0.7'`, which sm_90 needs."


def test_no_compiler(with_library: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    monkeypatch.setattr(library, "TOOLKIT", tmp_path)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    (reason,) = library.reasons("host", "sm_90", "fa3", strided=False)
    assert (reason.code, reason.text) == (
        "artifact-missing",
        "FlashInfer compiles its kernels for sm_90 at their first use, without nvcc or ninja.",
    )
    assert (
        reason.fix == "Install CUDA's compiler, run `pip install ninja`, or set CUDA_HOME to where nvcc is."
    )


def test_a_wrapper_without_scales(with_library: ModuleType) -> None:
    class Wrapper(with_library.BatchMLAPagedAttentionWrapper):  # type: ignore[misc, name-defined]
        def run(self, q_nope: None, q_pe: None, ckv_cache: None, kpe_cache: None) -> None: ...

    vars(with_library)[library.WRAPPER] = Wrapper
    (reason,) = library.reasons("host", "sm_90", "fa3", strided=False)
    assert reason.code == "package-version"
    assert "has no out in run, lse in run, return_lse in run" in reason.text
    del vars(with_library)[library.WRAPPER]
    (reason,) = library.reasons("host", "sm_90", "fa3", strided=False)
    assert reason.text == f"flashinfer-python 0.6.18.post1 has no {library.WRAPPER}."


def test_methods_fit_the_installed_library() -> None:
    """`plan` and `run`, whose calls nobody records."""
    if find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed here.")
    import flashinfer.mla

    assert library.missing_of_wrapper(flashinfer.mla) == []
    source = inspect.getsource(flashinfer.mla.BatchMLAPagedAttentionWrapper)
    assert "self._sm_scale = sm_scale" in source
    assert "sm_scale = self._sm_scale" in source


@on_a_cpu
def test_pools_out_of_reach(fa3: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_plugin_flashinfer import fa3 as engine

    host = Host(fa3, Case(C4A, heads=3, host_lengths=True))
    step = host.step((300,), (1,))
    q, selected = host.query(step), host.select(step)
    host.attend(step, q, selected)
    monkeypatch.setattr(engine, "UNITS", (1 << 40, 1 << 41))
    with pytest.raises(ConfigError, match="cannot be counted in int32 rows of .* align pools and pages"):
        host.attend(step, q, selected)


@pytest.mark.parametrize("kind", [SWA, C4A, C128A], ids=lambda kind: kind.name)
def test_several_plans_a_step(fa3: Subject, kind: LayerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """More queries than one plan holds, decodes before prefills; tables are made once a step but for C4A."""
    from dsv4_plugin_flashinfer import fa3 as engine

    monkeypatch.setattr(engine, "MOST_ROWS", 5)
    host = Host(fa3, Case(kind, heads=3, host_lengths=True, scales=LayerScales(kv=0.3), kv_cache_dtype="fp8"))
    made: list[object] = []
    make = engine.SharedStep._make
    monkeypatch.setattr(
        engine.SharedStep, "_make", lambda self, *rest: made.append(rest) or make(self, *rest)
    )
    for _ in range(2):
        made.clear()
        test_attention.compare(host, (700, 300, 64, 0), (1, 1, 5, 7), want_lse=True)
    assert len(host.kind.state._wrappers) == 3
    step = host.step((701, 301), (1, 1))
    made.clear()
    for _ in range(3):
        host.attend(step, host.query(step), host.select(step))
    assert len(made) == (3 if kind is C4A else 0)
    assert len(host.kind.state._wrappers) == 3, "Those of a larger step are planned for nothing."


def test_layers_whose_pools_lie_apart(fa3: Subject) -> None:
    """Each distance has a table of its own; a step's plan makes that of the first layer."""
    host = Host(fa3, Case(C128A, heads=3, host_lengths=True))
    step = host.step((700, 300), (1, 1))
    near = host.caches
    assert near.compressed is not None
    for caches in (near, "far", near, near, "far"):
        if caches == "far":
            pool = torch.cat((near.compressed.pool, near.compressed.pool))[: near.compressed.num_pages]
            host.caches = replace(near, compressed=replace(near.compressed, pool=pool))
        else:
            host.caches = near
        q = host.query(step)
        due, _ = host.expected(step, q, None, host.sinks)
        assert_attention(host.heads(host.attend(step, q, None)), due, step, host.plan.q_dtype)
    test_attention.compare(host, (701, 301), (1, 1))


def test_the_hosts_work_is_measured(fa3: Subject) -> None:
    """`bench.op=[prepare_step]`: the division of a step."""
    from dsv4core.bench.operations import measured

    host = Host(fa3, Case(C4A, heads=3, host_lengths=True))
    step = host.step((700, 300), (1, 1))
    prepared: list[Any] = []
    turn = SimpleNamespace(kind=SimpleNamespace(prepare_step=prepared.append), step=step)
    inputs = SimpleNamespace(
        workload=SimpleNamespace(kind=C4A),
        selection=host.selection,
        plan=host.plan,
        turns=lambda operation, calls: [turn],
    )
    own = measured("prepare_step", inputs)  # type: ignore[arg-type]
    own.calls[0]()
    assert own.host
    assert prepared == [step]
