"""Which AITER is found, what is refused and with which words, what is planned: without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from dsv4_plugin_rocm_aiter import calls, library, plugin
from dsv4_plugin_rocm_aiter.plugin import AiterOptions
from stub_aiter import VERSIONS, Install

from dsv4core import libraries
from dsv4core.api import C4A, BackendUnavailable, CacheError, ConfigError, Limits, Reason, Request
from dsv4core.cli.main import main
from dsv4core.framework import requirements
from dsv4core.framework.requirements import requirement_reasons
from dsv4core.framework.selection import select
from dsv4core.kvcache import allocate_cache, cache_layout, check_caches
from dsv4core.kvcache.pools import CachePools
from dsv4core.model.shapes import PRESETS, layer_spec

MODEL = PRESETS["v4_flash"]
REQUEST = Request(
    platform="rocm",
    arch="gfx950",
    model=MODEL,
    num_heads=64,
    limits=Limits(64, 8, 4096, 64),
    probe="static",
)


def distribution(folder: Path, name: str, version: str, *files: str) -> None:
    """An installed distribution: its metadata, and empty files."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('imported')" if path.suffix == ".py" else "")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that packages are found in, those of AITER nowhere else: a machine of AMD's has them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def version(name: str) -> str:
        if name not in ("aiter", "amd-aiter", "flydsl"):
            return metadata.version(name)
        named = (own for own in metadata.distributions(path=[str(tmp_path)]) if own.metadata["Name"] == name)
        if (found := next(named, None)) is None:
            raise metadata.PackageNotFoundError(name)
        return found.version

    for module in (libraries, requirements):
        monkeypatch.setattr(module, "version", version)
    for module in (library, requirements):
        monkeypatch.setattr(module, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    for name in [own for own in sys.modules if own.partition(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


AMD = ("aiter/__init__.py", "aiter/ops/triton/kernels.txt")


def found() -> list[Reason]:
    """As selection asks: requirements, then the backend, from metadata where a package is missing."""
    needed = requirement_reasons((library.REQUIREMENT,))
    return [*needed, *library.reasons("static")]


def test_none_is_installed(site: Path) -> None:
    reason, versions = found()
    assert (reason.code, reason.text) == (
        "package-missing",
        "It needs amd-aiter>=0.1.18, which is not installed.",
    )
    assert versions.code == "package-missing"
    assert versions.text.startswith("Here are amd-aiter (not installed), flydsl (not installed), triton 3.")
    assert versions.fix == f"{library.SOURCES}."
    assert "git+https://github.com/ROCm/aiter@v0.1.20.post1" in str(reason.fix)


def test_the_library_of_iterators(site: Path) -> None:
    """PyPI's `aiter` is imported by the same name."""
    distribution(site, "aiter", "0.13.20191203", "aiter/__init__.py")
    reason, versions = found()
    assert versions.text.startswith("Here are amd-aiter (not installed), ")
    assert (reason.code, reason.text) == (
        "package-wrong",
        "It needs amd-aiter>=0.1.18, but the installed 'aiter' is of another distribution.",
    )


def test_both_of_one_name(site: Path) -> None:
    """The one that was installed last has written the files."""
    distribution(site, "amd-aiter", "0.1.20")
    distribution(site, "aiter", "0.13.20191203", "aiter/__init__.py")
    (reason,) = found()
    assert (reason.code, reason.text) == (
        "package-wrong",
        "amd-aiter 0.1.20 is installed, and the files of `aiter` are another project's.",
    )
    assert str(reason.fix).startswith(
        "Run `pip uninstall aiter amd-aiter`, then `AITER_USE_SYSTEM_TRITON=1 pip"
    )


def test_the_one_of_pypi(site: Path) -> None:
    """It is too old; the three versions that have to fit are named, and who brings them."""
    distribution(site, "amd-aiter", "0.1.7.post2.dev18", *AMD)
    distribution(site, "flydsl", "0.1.5")
    old, versions = found()
    assert (old.code, old.text) == (
        "package-version",
        "It needs amd-aiter>=0.1.18, and amd-aiter 0.1.7.post2.dev18 is installed.",
    )
    assert versions.code == "package-version"
    assert versions.text.startswith("Here are amd-aiter 0.1.7.post2.dev18, flydsl 0.1.5, triton 3.")
    assert versions.fix == f"{library.SOURCES}."


@pytest.mark.parametrize("version", ["0.1.18", "0.1.20.post2.dev7+g1a2b3c4", "0.1.22+rocm7.2"])
def test_one_that_fits(site: Path, version: str) -> None:
    """Nothing of it is imported: its files would raise."""
    distribution(site, "amd-aiter", version, *AMD)
    assert found() == []


def test_a_torch_that_is_not_for_rocm(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    distribution(site, "amd-aiter", "0.1.20", *AMD)
    (reason,) = library.reasons("host")
    assert (reason.code, reason.text) == (
        "package-version",
        f"torch {torch.__version__} is not built for ROCm, whose kernels AITER's are.",
    )
    assert reason.fix


def test_no_rocm(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AITER raises where ROCm's files are not there, whatever of it is imported."""
    distribution(site, "amd-aiter", "0.1.20", *AMD)
    (site / "aiter" / "__init__.py").write_text("raise RuntimeError('ROCm version file not found')")
    monkeypatch.setattr(torch.version, "hip", "7.2")
    (reason,) = library.reasons("host")
    assert (reason.code, reason.text) == (
        "artifact-missing",
        "amd-aiter 0.1.20 cannot be imported: RuntimeError: ROCm version file not found.",
    )
    assert "these are amd-aiter 0.1.20, flydsl (not installed), triton 3." in str(reason.fix)


def test_symbols_by_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function, a kernel, a tuned kernel; one that is not there, or has lost a parameter."""

    def attend(q: Any, sinks: Any) -> None:
        """Of these two."""

    module = ModuleType("aiter.ops")
    module.attend = attend  # type: ignore[attr-defined]
    module.tuned = SimpleNamespace(fn=SimpleNamespace(arg_names=["q_ptr", "BLOCK"]))  # type: ignore[attr-defined]
    for name, own in (("aiter", ModuleType("aiter")), ("aiter.ops", module)):
        monkeypatch.setitem(sys.modules, name, own)
    library.missing.cache_clear()
    assert library.missing("aiter.ops.attend", ("q", "sinks")) == ""
    assert library.missing("aiter.ops.attend", ("q", "scale", "out")) == "has no scale, out"
    assert library.missing("aiter.ops.tuned", ("q_ptr",)) == ""
    assert library.missing("aiter.ops.tuned", ("kv_ptr",)) == "has no kv_ptr"
    assert library.missing("aiter.ops.gone", ("q",)).startswith("cannot be imported: AttributeError: module")
    assert library.missing("aiter.gone.attend", ("q",)).startswith("cannot be imported: ModuleNotFoundError")
    library.missing.cache_clear()


def test_nothing_is_imported_with_the_plugin() -> None:
    code = (
        "import sys, dsv4_plugin_rocm_aiter.plugin as plugin; plugin.dsv4_backend_info(); "
        "print(sorted({'aiter', 'torch', 'triton', 'flydsl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_explain(site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The three versions, who brings them, and every route with what was passed over."""
    distribution(site, "amd-aiter", "0.1.20.post1", *AMD)
    distribution(site, "flydsl", "0.3.1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    words = ["explain", "backend=rocm_aiter", "model=v4_flash"]
    assert main([*words, "request.arch=gfx950"]) == 0
    said = capsys.readouterr().out
    assert "amd-aiter 0.1.20.post1, flydsl 0.3.1, triton 3." in said
    assert library.SOURCES in said
    assert "decode by AITER's pa_decode_sparse (gluon); mla_decode_fwd_v4_nm (asm) is for rows of two" in said
    assert "insert by the core; fused_qk_norm_rope_group_quant (hip) is for rows of two buffers; " in said
    assert "inverse RoPE by the quantisation, or before an einsum where scales are no powers of two" in said
    assert "\nc4a: index_topk by AITER's top_k_per_row_prefill (hip)\n" in said, "Others have no indexer."
    assert main([*words, "request.arch=gfx950", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]["c4a"]
    assert (plan["routes"]["insert"], plan["rotates_back"]) == ("the core", "quantisation")
    assert plan["routes"]["decode"] == (
        "aiter.ops.triton.attention.pa_decode_sparse.pa_decode_sparse (gluon)"
    )
    assert main([*words, "request.arch=gfx942", "kv_cache_dtype=bf16", "backend.core=[index_topk]"]) == 0
    said = capsys.readouterr().out
    assert "\nswa: decode by AITER's pa_decode_sparse (triton); " in said
    assert "pa_decode_sparse (triton) attends one pool, and this layer has two\n" in said
    assert "index_topk by the core; backend.core has index_topk" in said
    assert main([*words, "request.arch=gfx90a"]) == 2
    assert "It is made for gfx942 and gfx950, and this is gfx90a." in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"arch": "gfx1201"}, "arch", "It is made for gfx942 and gfx950, and this is gfx1201."),
        (
            {"dtype": "float32"},
            "model",
            "Activations are float32, and AITER's queries and outputs are bfloat16.",
        ),
        (
            {"context_parallel": 2},
            "parallel",
            "context_parallel=2, and a rank's kernels read the whole context.",
        ),
        (
            {"model": replace(MODEL, head_dim=256)},
            "head-dim",
            "Heads have 256 channels, and AITER's kernels have 512.",
        ),
        (
            {"model": replace(MODEL, index_n_heads=48)},
            "model",
            "index_n_heads is 48, and the core's kernels take powers of two.",
        ),
        (
            {"limits": Limits(262_144, 8, 1 << 20, 8192)},
            "model",
            "262,144 query tokens attend up to 8,192 rows of a pool each, and AITER's lists of them end at "
            "2,147,483,647.",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], code: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed", VERSIONS.get)
    monkeypatch.setattr(library, "_is_of_amd", lambda: True)
    (reason,) = plugin.dsv4_unsupported_reasons(replace(REQUEST, **changes))
    assert (reason.code, reason.text) == (code, text)
    assert reason.fix
    assert plugin.dsv4_unsupported_reasons(REQUEST) == []


def test_lists_as_long_as_32_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reason says is accepted."""
    monkeypatch.setattr(library, "installed", VERSIONS.get)
    monkeypatch.setattr(library, "_is_of_amd", lambda: True)
    (reason,) = plugin.dsv4_unsupported_reasons(replace(REQUEST, limits=Limits(262_144, 8, 1 << 20, 8192)))
    assert reason.fix == "Set max_tokens=262143 or less, or max_model_len lower."
    most = Limits(262_143, 8, 1 << 20, 8192)
    assert plugin.dsv4_unsupported_reasons(replace(REQUEST, limits=most)) == []


def test_options() -> None:
    with pytest.raises(
        ConfigError, match=r"backend.core=\['attend'\] names no operations; they are insert, comp"
    ):
        AiterOptions(core=["attend", "decode"])
    with pytest.raises(ConfigError, match="backend.projection=fp8 is not known; write auto, einsum or core."):
        AiterOptions(projection="fp8")


@pytest.mark.parametrize(("arch", "window"), [("gfx942", "e4m3fnuz"), ("gfx950", "e4m3fn")])
def test_flavours_belong_to_pools(arch: str, window: str) -> None:
    layout = plugin.dsv4_resolve_kv_cache(replace(REQUEST, arch=arch))
    assert (layout.window.fp8, layout.compressed.fp8, layout.index.fp8) == (window, "e4m3fn", "e4m3fn")
    assert layout.window.parts[0].dtype == f"float8_{window}"
    plain = plugin.dsv4_resolve_kv_cache(replace(REQUEST, arch=arch, kv_cache_dtype="bf16"))
    assert (plain.window.name, plain.window.fp8) == ("bf16", None)
    with pytest.raises(ConfigError, match="kv_cache_dtype=fp32 is not one that backend=rocm_aiter can store"):
        plugin.dsv4_resolve_kv_cache(replace(REQUEST, kv_cache_dtype="fp32"))


def test_rows_that_nobody_has_are_refused_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All reasons at once, though the backend has one of its own for what is missing."""
    monkeypatch.setattr(library, "installed", lambda name: None)
    monkeypatch.setattr(requirements, "_installed", lambda requirement: None)
    monkeypatch.setattr(requirements, "_importable", lambda module: False)
    with pytest.raises(BackendUnavailable) as caught:
        select(replace(REQUEST, kv_cache_dtype="fp32"), "rocm_aiter")
    reasons = caught.value.decisions[0].reasons
    assert [own.code for own in reasons] == ["package-missing"] * 3 + ["kv-dtype"]
    assert reasons[-1].text.startswith("kv_cache_dtype=fp32 is not one that backend=rocm_aiter can store")


def test_pools_of_the_other_flavour_are_refused() -> None:
    """A host that keeps its window in OCP's codes on gfx942 is told so, before anything is read."""
    layer, layout = layer_spec(MODEL, 2), plugin.dsv4_resolve_kv_cache(replace(REQUEST, arch="gfx942"))
    other = cache_layout(MODEL, "fp8_ds_mla", "fp8")
    pools = CachePools([layer], other, REQUEST.page_sizes, Limits(8, 1, 256, 8))
    with pytest.raises(
        CacheError, match=r"window cache has format fp8_ds_mla \(e4m3fn\), and the backend's layo"
    ):
        check_caches(pools.layers[2], layer, layout)
    check_caches(
        CachePools([layer], layout, REQUEST.page_sizes, Limits(8, 1, 256, 8)).layers[2], layer, layout
    )


@pytest.mark.parametrize(
    ("arch", "options", "rotates", "dtype"),
    [
        ("gfx950", {}, "quantisation", "float8_e4m3fn"),
        ("gfx942", {}, "einsum", ""),
        ("gfx950", {"projection": "einsum"}, "einsum", ""),
        ("gfx950", {"projection": "core"}, "projection", ""),
        ("gfx950", {"core": ["o_proj"]}, "projection", ""),
        ("gfx950", {"core": ["inverse_rope_quant"]}, "projection", ""),
    ],
)
def test_plans(
    arch: str, options: dict[str, Any], rotates: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads as they are; who applies the inverse RoPE; nobody else does."""
    monkeypatch.setattr(library, "installed", VERSIONS.get)
    model = replace(MODEL, num_attention_heads=8)
    request = replace(REQUEST, arch=arch, model=model, num_heads=8)
    plan = plugin.dsv4_plan_layer(request, layer_spec(model, 2), AiterOptions(**options))
    assert (plan.rotates_back, plan.projection_dtype) == (rotates, dtype)
    assert plan.variant.endswith(f"; inverse RoPE {plugin.ROTATION[plan.rotates_back]}")
    assert "index_topk" in plan.variant
    assert not plan.output.inverse_rotated
    assert (plan.padded_q_heads, plan.output.padded, plan.core_ops) == (8, False, "triton")
    assert plan.own_ops == {"index_logits", "index_topk"}
    assert plan.notes[0].startswith("amd-aiter 0.1.20.post1, flydsl 0.3.1, triton 3.7.0; AMD's images")
    assert len(plan.notes) == 9
    at_the_kernels = replace(request, seam="kernel")
    for other, number in ((request, 0), (at_the_kernels, 2)):
        plan = plugin.dsv4_plan_layer(other, layer_spec(model, number), AiterOptions(**options))
        assert not plan.own_ops
        assert "index" not in plan.variant
        assert not any(note.startswith("index_") for note in plan.notes)


def test_pages_that_are_apart() -> None:
    format = cache_layout(MODEL, "bf16", "fp8").window
    apart = allocate_cache(format, 3, 61, page_stride_bytes=61 * 1024 + 512)
    with pytest.raises(ConfigError, match="Pages are 62,976 bytes apart and take 62,464, and AITER's kernel"):
        calls.flat_rows(apart)
    tight = allocate_cache(format, 3, 61)
    assert calls.flat_rows(tight).shape == (183, 512)
    assert calls.flat_rows(tight).data_ptr() == tight.pool.data_ptr()


@pytest.mark.parametrize(
    ("tokens", "heads", "parts"),
    [(1, 8, 16), (1, 128, 16), (9, 64, 4), (128, 16, 2), (129, 16, 1), (9999, 128, 1)],
)
def test_parts_of_a_list(tokens: int, heads: int, parts: int) -> None:
    assert calls.splits(tokens, heads) == parts


def test_c4a_of_a_graph_has_room_from_the_beginning(install: Install) -> None:
    """Buffers keep their addresses, whatever a step needs."""
    from dsv4_plugin_rocm_aiter.layer import SharedStep

    install("gfx950")
    request = replace(REQUEST, platform="cpu", arch="", graph=True)
    plan = plugin.dsv4_plan_layer(request, layer_spec(MODEL, 2), AiterOptions())
    state = SharedStep(request, C4A, plan, torch.device("cpu"))
    assert state._window_room is not None
    assert state._entry_room is not None
    assert len(state._window_room.indices) == 64 * 128
    assert len(state._entry_room.indices) == 64 * MODEL.index_topk
    rooms = [state._room(state._entry_room, tokens, 512) for tokens in (1, 64)]
    assert all(room is state._entry_room for room in rooms)
