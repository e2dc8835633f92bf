"""What is refused, with which words, without a GPU and without FlashInfer; which calls fit the library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import stub_flashinfer
import torch
from dsv4_plugin_flashinfer import library, plugin
from dsv4_plugin_flashinfer.plugin import FlashInferOptions

from dsv4core import libraries
from dsv4core.api import (
    C4A,
    C128A,
    SWA,
    ConfigError,
    LayerKind,
    LayerScales,
    Limits,
    Request,
)
from dsv4core.kvcache import KV_CACHE_DTYPES, accepted_dtypes
from dsv4core.model.shapes import PRESETS, layer_spec
from dsv4core.testing.case import Case
from dsv4core.testing.host import Host
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import test_attention
from dsv4core.testing.suite.test_calls import *  # noqa: F403

REQUEST = Request(
    platform="cuda",
    arch="sm_100",
    model=PRESETS["v4_flash"],
    num_heads=64,
    limits=Limits(64, 8, 4096, 64),
    probe="static",
)


@pytest.fixture(autouse=True)
def nothing_installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Distributions by version, as a test wants them."""
    found = {"torch": "2.13.0"}
    for module in (library, libraries):
        monkeypatch.setattr(module, "installed", found.get)
    return found


@pytest.fixture
def dsv4() -> Subject:
    """The backend itself, whose calls are followed; nothing is computed."""
    return Subject("flashinfer")


@pytest.fixture
def stubbed(stub: None) -> Subject:
    return Subject("flashinfer", device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        (
            {"arch": "sm_120"},
            "arch",
            "FlashInfer's kernels for sm_120 read packed rows, and this backend has",
        ),
        ({"arch": "sm_80"}, "arch", "It is made for sm_90, sm_100, sm_103, and this is sm_80."),
        ({"num_heads": 256}, "q-heads", "256 query heads a rank, and its kernels have 128 at most."),
        ({"dtype": "float32"}, "model", "Activations are float32, and its outputs are bfloat16."),
        ({"context_parallel": 2}, "parallel", "context_parallel=2, and a rank's kernels read the whole"),
        (
            {"model": replace(REQUEST.model, sliding_window=64)},
            "model",
            "A window of 64 tokens and heads of 512, and its kernels have 128 and 512.",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], code: str, text: str) -> None:
    (reason,) = plugin.dsv4_unsupported_reasons(replace(REQUEST, **changes), FlashInferOptions())
    assert reason.code == code
    assert reason.text.startswith(text)
    assert reason.fix
    assert plugin.dsv4_unsupported_reasons(REQUEST, FlashInferOptions()) == []


def test_packed_rows_are_refused() -> None:
    accepted = accepted_dtypes(KV_CACHE_DTYPES, plugin.KV_FORMATS)
    assert accepted == ["auto", "fp8", "fp8_e4m3", "bf16", "bfloat16"]
    names = {
        asked: plugin.dsv4_resolve_kv_cache(replace(REQUEST, kv_cache_dtype=asked)).window.name
        for asked in accepted
    }
    assert names == dict.fromkeys(accepted, "bf16") | dict.fromkeys(("fp8", "fp8_e4m3"), "fp8_e4m3")
    with pytest.raises(ConfigError, match="kv_cache_dtype=fp8_ds_mla is not one that backend=flashinfer can"):
        plugin.dsv4_resolve_kv_cache(replace(REQUEST, kv_cache_dtype="fp8_ds_mla"))


def test_unknown_launch() -> None:
    with pytest.raises(ConfigError, match="backend.launch=mixed is not known; write split or single"):
        FlashInferOptions(launch="mixed")


@pytest.fixture
def with_library(
    nothing_installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ModuleType:
    """FlashInfer 0.6.18 and its cubins are there."""
    nothing_installed[library.DISTRIBUTION] = "0.6.18.post1"
    modules = stub_flashinfer.modules()
    monkeypatch.setattr(library, "import_module", modules.__getitem__)
    monkeypatch.setattr(library.shutil, "which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "2d6a5a" / "fmha" / "trtllm-gen").mkdir(parents=True)
    (tmp_path / "2d6a5a" / "fmha" / "trtllm-gen" / "one.cubin").touch()
    vars(modules["flashinfer.jit.env"])["FLASHINFER_CUBIN_DIR"] = tmp_path
    return modules["flashinfer.mla"]


def test_a_library_that_fits(with_library: ModuleType) -> None:
    assert list(library.reasons("host", "sm_100", "trtllm-gen", strided=True)) == []


def test_missing_cubins(with_library: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of another version are there."""
    (tmp_path / "2d6a5a").rename(tmp_path / "d79b5c")
    (reason,) = library.reasons("host", "sm_100", "trtllm-gen", strided=False)
    assert (reason.code, reason.fix) == (
        "artifact-missing",
        "Run `flashinfer download-cubin` where there is a network.",
    )
    assert list(library.reasons("static", "sm_100", "trtllm-gen", strided=False)) == []


def test_no_compiler(
    with_library: ModuleType,
    nothing_installed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What launches the kernels is compiled, or in a package."""
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    monkeypatch.setattr(library, "TOOLKIT", tmp_path)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    (reason,) = library.reasons("host", "sm_100", "trtllm-gen", strided=False)
    assert reason.text.endswith("for sm_100 at their first use, without nvcc or ninja.")
    nothing_installed["flashinfer-jit-cache"] = "0.6.18.post1"
    assert list(library.reasons("host", "sm_100", "trtllm-gen", strided=False)) == []


def test_a_library_without_storage_offsets(with_library: ModuleType) -> None:
    vars(with_library)[library.DECODE] = stub_flashinfer.KERNELS["0.6.18"]
    assert list(library.reasons("host", "sm_100", "trtllm-gen", strided=False)) == []
    (reason,) = library.reasons("host", "sm_100", "trtllm-gen", strided=True)
    assert (reason.code, reason.text) == (
        "layout",
        "flashinfer-python 0.6.18.post1 takes pages without padding, and the host's have some.",
    )


def test_a_library_without_the_kernel(with_library: ModuleType) -> None:
    del vars(with_library)[library.DECODE]
    (reason,) = library.reasons("host", "sm_100", "trtllm-gen", strided=False)
    assert reason.text == f"flashinfer-python 0.6.18.post1 has no {library.DECODE}."
    assert reason.fix == "Run `pip install 'flashinfer-python>=0.6.18,<0.8'`."


@pytest.mark.parametrize(("heads", "padded"), [(1, 8), (8, 8), (17, 32), (64, 64), (128, 128)])
def test_plans(heads: int, padded: int) -> None:
    request = replace(REQUEST, num_heads=heads, kv_cache_dtype="fp8")
    spec = replace(layer_spec(request.model, 2), num_heads=heads)
    plan = plugin.dsv4_plan_layer(request, spec, FlashInferOptions())
    assert (plan.padded_q_heads, plan.q_dtype) == (padded, "float8_e4m3fn")
    assert "launch=split" in plan.variant


@pytest.mark.parametrize(("dtype", "scales"), [("fp8", (0.125, 0.25)), ("bf16", (1.0, 1.0))])
def test_scales_are_numbers(
    stubbed: Subject, dtype: str, scales: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for scores, with the softmax's own; once for values: of FP8 rows, and of bf16 rows none."""
    from dsv4_plugin_flashinfer import trtllm

    seen: list[tuple[float, float]] = []

    def watched(**arguments: Any) -> torch.Tensor:
        seen.append((arguments["bmm1_scale"], arguments["bmm2_scale"]))
        return stub_flashinfer.trtllm_batch_decode_sparse_mla_dsv4(**arguments)

    case = Case(SWA, heads=8, kv_cache_dtype=dtype, scales=LayerScales(q=0.5, kv=0.25))
    host = Host(stubbed, case)
    monkeypatch.setattr(trtllm.flashinfer.mla, library.DECODE, watched)
    monkeypatch.setattr(library, "counts_storage", lambda module: False)
    test_attention.compare(host, (300,), (2,))
    assert seen == [(REQUEST.model.softmax_scale * scales[0], scales[1])]


@pytest.mark.parametrize("query", [((300, 0), (0, 40)), ((300, 0), (1, 0)), ((3, 0), (0, 0))])
def test_launches_of_nothing_are_left_out(
    stubbed: Subject, query: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    host = Host(stubbed, Case(SWA, heads=8))
    test_attention.compare(host, *query)
    assert len(host.kind.state.launches) == (1 if sum(query[1]) else 0)


def test_graphs_do_not_depend_on_a_steps_lengths(stubbed: Subject) -> None:
    """A grid is as wide as the longest query that there may be."""
    host = Host(stubbed, Case(SWA, heads=8, graph=True, host_lengths=True))
    host.step((300, 0), (1, 40))
    assert [launch.longest for launch in host.kind.state.launches] == [1, host.case.limits.max_query_len]


def test_pages_that_the_library_does_not_take(stubbed: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_plugin_flashinfer import trtllm

    host = Host(stubbed, Case(SWA, heads=8, page_gap=1))
    step = host.step((300,), (1,))
    q = host.query(step)
    host.attend(step, q, None)
    monkeypatch.setattr(trtllm.flashinfer.mla, library.DECODE, stub_flashinfer.KERNELS["0.6.18"])
    with pytest.raises(ConfigError, match="reads pages that are apart by no more than their 64 rows"):
        host.attend(step, q, None)


@pytest.mark.parametrize("kind", [SWA, C4A, C128A], ids=lambda kind: kind.name)
@pytest.mark.parametrize("launch", ["split", "single"])
@pytest.mark.parametrize("version", stub_flashinfer.KERNELS)
def test_mixed_steps(
    stubbed: Subject, version: str, launch: str, kind: LayerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes before prefills, in two launches or in one; tables are made once a step."""
    from dsv4_plugin_flashinfer import trtllm

    monkeypatch.setattr(trtllm.flashinfer.mla, library.DECODE, stub_flashinfer.KERNELS[version])
    subject = replace(stubbed, options=FlashInferOptions(launch=launch))
    host = Host(subject, Case(kind, heads=24, host_lengths=version == "0.7.0"))
    test_attention.compare(host, (700, 300, 64, 0), (1, 1, 5, 7))
    assert len(host.kind.state.launches) == (2 if launch == "split" else 1)
    assert len(host.kind.state.shared) == (0 if kind is C4A else 1)


@pytest.mark.parametrize("kind", [SWA, C128A], ids=lambda kind: kind.name)
def test_pages_apart_have_one_table_a_step(
    stubbed: Subject, kind: LayerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step on the plan makes it; what a plan made eagerly is made anew for a graph."""
    host = Host(stubbed, Case(kind, heads=24, page_gap=3))
    step, made = host.step((300,), (1,)), list[object]()
    operations = host.kind.state._operations

    def counted(*arguments: object) -> object:
        made.append(arguments)
        return operations.mixed_sparse_indices(*arguments)

    others = vars(operations) | {"mixed_sparse_indices": counted}
    monkeypatch.setattr(host.kind.state, "_operations", SimpleNamespace(**others))
    for _ in range(3):
        host.attend(step, host.query(step), None)
    step = host.step((300,), (1,))
    for _ in range(3):
        host.attend(step, host.query(step), None)
    assert len(made) == 2  # the first layer's of the first step, whose plan knew of tight pages alone
    monkeypatch.setattr(host.kind.state, "_captures", lambda: True)
    host.attend(step, host.query(step), None)
    assert len(made) == 3
