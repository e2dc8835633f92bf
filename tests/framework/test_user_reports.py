"""What went wrong for users of such backends elsewhere, in selection, dtypes, configuration and loading.

Each test names its public report. What a backend alone can be guilty of (A13: index spaces) is for the
conformance suite.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4core.api import C4A, BackendUnavailable, KVCacheLayout, LayerSpec, Request
from dsv4core.config import DSV4Config
from dsv4core.framework.binding import bind_layer
from dsv4core.framework.discovery import discover
from dsv4core.framework.manager import load_backend
from dsv4core.framework.order import DEFAULT_ORDER
from dsv4core.framework.platform import Machine
from dsv4core.framework.request import build_request
from dsv4core.framework.selection import select
from dsv4core.kvcache import KV_CACHE_DTYPES, allocate_cache
from dsv4core.model.shapes import PRESETS
from dsv4core.testing.fakes import altered, install_backend

ANYWHERE = ('("cpu",)', '("cpu", "cuda", "rocm")')
REASONS = "def dsv4_unsupported_reasons(request):\n    return []\n"
LAYOUT = """    row = KVCacheFormat("bf16", (KVCachePart("row", "bfloat16", 512),))
    return KVCacheLayout(row, row, row, row)
"""
RESOLVES = """    from dsv4core.kvcache import KV_CACHE_DTYPES, cache_layout, resolve_dtype
    chosen = resolve_dtype("kv_cache_dtype", request.kv_cache_dtype, KV_CACHE_DTYPES, FORMATS, "acme")
    return cache_layout(request.model, chosen, "fp8")
"""
PACKED, PLAIN = ("fp8_ds_mla",), ("bf16", "fp8_e4m3")


def reasons_of(error: pytest.ExceptionInfo[BackendUnavailable], name: str) -> list[str]:
    return [
        str(r) for decision in error.value.decisions if decision.backend == name for r in decision.reasons
    ]


RESOLUTIONS = [
    (PACKED, "auto", ("fp8_ds_mla", "uint8", 584)),
    (PACKED, "fp8", ("fp8_ds_mla", "uint8", 584)),
    (PLAIN, "auto", ("bf16", "bfloat16", 1024)),
    (PLAIN, "fp8_e4m3", ("fp8_e4m3", "float8_e4m3fn", 512)),
]


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
@pytest.mark.parametrize(("formats", "asked", "expected"), RESOLUTIONS)
def test_a01_auto_resolves_wherever_a_dtype_does(
    folder: Path,
    request_: Request,
    arch: str,
    formats: tuple[str, ...],
    asked: str,
    expected: tuple[str, str, int],
) -> None:
    install_backend(folder, "acme", f"FORMATS = {formats}\n" + altered(ANYWHERE, (LAYOUT, RESOLVES)))
    request = replace(request_, platform="cuda", arch=arch, kv_cache_dtype=asked)
    window = select(request, "acme").layout.window
    assert (window.name, window.storage_dtype, window.bytes_per_token) == expected


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_a01_a_refused_dtype_lists_what_is_accepted(folder: Path, request_: Request, arch: str) -> None:
    install_backend(folder, "acme", f"FORMATS = {PACKED}\n" + altered(ANYWHERE, (LAYOUT, RESOLVES)))
    with pytest.raises(BackendUnavailable) as caught:
        select(replace(request_, platform="cuda", arch=arch, kv_cache_dtype="bfloat16"), "acme")
    assert reasons_of(caught, "acme") == [
        "[kv-dtype] kv_cache_dtype=bfloat16 is not one that backend=acme can store; "
        "it accepts: auto, fp8, fp8_ds_mla, fp8_e4m3."
    ]


def resolved(request: Request, name: str) -> KVCacheLayout | str:
    try:
        return select(request, name).layout
    except BackendUnavailable as error:
        return str(error.decisions[0].reasons[0])


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a02_what_is_accepted_is_what_a_pool_can_hold(
    name: str, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that all of them run on a CPU
    answers = {asked: resolved(replace(request_, kv_cache_dtype=asked), name) for asked in KV_CACHE_DTYPES}
    accepted = [asked for asked, answer in answers.items() if isinstance(answer, KVCacheLayout)]
    assert "auto" in accepted
    for asked, answer in answers.items():
        if isinstance(answer, str):
            assert answer.endswith(f"it accepts: {', '.join(accepted)}."), asked
        else:
            for format in (answer.window, answer.compressed):
                assert allocate_cache(format, num_pages=1, page_size=2).num_pages == 1


def test_a03_an_unsupported_machine_is_refused_before_anything_is_built(
    folder: Path, request_: Request
) -> None:
    only = REASONS.replace("[]", "[] if request.arch == 'sm_90' else [Reason('arch', 'It serves sm_90.')]")
    build = ('return ("layer"', 'raise MemoryError\n    return ("layer"')
    install_backend(
        folder, "acme", altered(ANYWHERE, (REASONS, only), build, ("hookimpl,\n", "hookimpl, Reason,\n"))
    )
    with pytest.raises(BackendUnavailable) as caught:
        select(replace(request_, platform="cuda", arch="sm_121"), "acme")
    assert reasons_of(caught, "acme") == ["[arch] It serves sm_90."]
    selection = select(replace(request_, platform="cuda", arch="sm_90"), "acme")
    assert set(selection.plans) == {kind.name for kind in request_.model.kinds}


ORDERS = {
    "cpu": ("reference",),
    "cuda": ("triton",),
    "sm_90": ("hopper", "flashmla", "triton", "flashinfer"),
    **{
        f"sm_90_heads_{heads}": ("hopper", "triton", "flashmla", "flashinfer")
        for heads in (1, 2, 4, 8, 16, 32)
    },
    "sm_100": ("flashinfer", "flashmla", "triton"),
    "sm_103": ("flashinfer", "triton"),
    "rocm": (),
    "gfx942": ("rocm_aiter",),
    "gfx950": ("rocm_aiter",),
}


def test_a04_the_default_order_of_every_machine_is_pinned() -> None:
    assert dict(DEFAULT_ORDER) == ORDERS


def test_a04_another_default_for_one_machine_leaves_the_others_alone(folder: Path, request_: Request) -> None:
    for name in ("old", "new"):
        install_backend(folder, name, altered(ANYWHERE))
    before = {"cuda": ["old"], "sm_90": ["old"]}
    after = {"cuda": ["old"], "sm_90": ["new", "old"]}
    requests = {arch: replace(request_, platform="cuda", arch=arch) for arch in ("sm_90", "sm_120")}
    chosen = {
        arch: [select(request, order=order) for order in (before, after)]
        for arch, request in requests.items()
    }
    assert [selection.backend.name for selection in chosen["sm_90"]] == ["old", "new"]
    first, second = chosen["sm_120"]
    assert (first.plans, first.layout, first.decisions) == (second.plans, second.layout, second.decisions)


def test_a05_a_layer_says_what_runs(folder: Path, request_: Request) -> None:
    install_backend(folder, "acme", altered(("own_ops=frozenset()", "variant='split-KV'")))
    selection = select(request_, order={"cpu": ["acme"]})
    spec = LayerSpec(3, C4A, request_.model, num_heads=16)
    layer = bind_layer(selection, spec, "weights", "cpu")  # type: ignore[arg-type]
    assert layer.describe() == {
        "backend": "acme",
        "distribution": "fake-acme",
        "version": "1.0",
        "variant": "split-KV",
    }
    assert (selection.asked, selection.decisions[0].verdict) == ("auto", "chosen")


def test_a06_a_name_of_another_engines_backend_is_none_of_ours(folder: Path, request_: Request) -> None:
    install_backend(folder, "acme")
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, "aiter")
    assert str(caught.value) == (
        "backend=aiter cannot run this request: [package-missing] No backend is named 'aiter'. Did you mean "
        "'rocm_aiter'? What could run here, if you name it: acme."
    )
    with pytest.raises(
        BackendUnavailable, match="The names are: acme, auto, flashinfer, flashmla, hopper, rocm_a"
    ):
        select(request_, "triton_mla")


def test_a07_determinism_is_declared_or_refused(folder: Path, request_: Request) -> None:
    install_backend(folder, "acme")
    install_backend(folder, "exact", altered(("frozenset(),", "frozenset({'deterministic'}),")))
    request = replace(request_, deterministic=True)
    assert select(request, "exact").backend.name == "exact"
    with pytest.raises(BackendUnavailable) as caught:
        select(request, "acme")
    assert reasons_of(caught, "acme") == [
        "[capability] The request needs 'deterministic' (a row's output does not depend on the other rows of "
        "its batch), which it does not declare."
    ]


def test_a08_no_variable_of_the_environment_is_an_option(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_backend(folder, "acme")

    def built() -> Request:
        return build_request(DSV4Config(), PRESETS["tiny"], Machine("cpu", "", ""), probe="host")

    before = select(built(), "acme")
    for name in ("DSV4_BACKEND", "DSV4_KV_CACHE_DTYPE"):
        monkeypatch.setenv(name, "other")
    after = select(built(), "acme")
    assert (after.request, after.options, after.plans) == (before.request, before.options, before.plans)
    assert caplog.messages == [
        f"The environment variable {name} changes nothing. Options are keys of the configuration."
        for name in ("DSV4_BACKEND", "DSV4_KV_CACHE_DTYPE")
    ]


def test_a09_a_stale_plugin_is_reported_and_nothing_is_served_in_its_place(
    folder: Path, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_backend(folder, "acme", "import the_module_that_moved")
    install_backend(folder, "other")
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, "acme")
    assert str(caught.value) == (
        "backend=acme cannot run this request: [broken] Backend 'acme' of fake-acme 1.0 cannot be loaded: "
        f"ModuleNotFoundError: No module named 'the_module_that_moved' ({folder / 'fake_acme.py'}, line 1). "
        "Repair or uninstall fake-acme; DSV4_STRICT=1 shows the traceback. "
        "What could run here, if you name it: other."
    )
    monkeypatch.setenv("DSV4_STRICT", "1")
    with pytest.raises(ModuleNotFoundError, match="the_module_that_moved") as strict:
        load_backend(discover()["acme"])
    if sys.version_info >= (3, 11):
        assert strict.value.__notes__ == ["backend 'acme' of fake-acme 1.0 (fake_acme)"]


def test_a10_a_plugin_for_another_core_is_never_imported(folder: Path, request_: Request) -> None:
    install_backend(folder, "acme", "raise SystemExit('imported')", requires="dsv4core>=99")
    install_backend(folder, "other")
    selection = select(request_, order={"cpu": ["acme", "other"]})
    assert selection.backend.name == "other"
    assert [reason.code for reason in selection.decisions[0].reasons] == ["api"]
    assert "needs dsv4core>=99, and this is dsv4core " in selection.decisions[0].reasons[0].text
    assert "fake_acme" not in sys.modules


def test_a11_a_vendor_may_have_several_backends(folder: Path, request_: Request) -> None:
    install_backend(folder, "acme.a", distribution="fake-a")
    install_backend(folder, "acme.b", distribution="fake-b")
    assert select(request_, "acme.a").backend.record.distribution == "fake-a"
    assert select(request_, "acme.b").backend.record.distribution == "fake-b"
    install_backend(folder, "acme.a", distribution="fake-c")
    with pytest.raises(BackendUnavailable, match=r"by fake-a 1\.0 \(.*\) and fake-c 1\.0 "):
        select(request_, "acme.a")
    assert select(request_, "acme.b").backend.name == "acme.b"


PROBE = """def dsv4_unsupported_reasons(request):
    if request.probe == "host":
        import inspect
        import fake_kernels
        if "topk_lens" not in inspect.signature(fake_kernels.decode).parameters:
            text = f"fake_kernels {fake_kernels.__version__} has a decode without topk_lens."
            return [Reason("package-version", text, "Run `pip install 'fake-kernels>=0.6.14'`.")]
    return []
"""


@pytest.mark.parametrize("arguments", ["q", "q, topk_lens"])
def test_a12_signatures_are_probed_and_nothing_is_called(
    folder: Path, request_: Request, arguments: str
) -> None:
    kernels = f"__version__ = '0.6.13'\ndef decode({arguments}): raise SystemExit('called')\n"
    (folder / "fake_kernels.py").write_text(kernels)
    install_backend(folder, "acme", altered((REASONS, PROBE), ("hookimpl,\n", "hookimpl, Reason,\n")))
    assert select(replace(request_, probe="static"), "acme").backend.name == "acme"
    assert "fake_kernels" not in sys.modules
    if "topk_lens" in arguments:
        assert select(request_, "acme").backend.name == "acme"
        return
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, "acme")
    assert reasons_of(caught, "acme") == [
        "[package-version] fake_kernels 0.6.13 has a decode without topk_lens. "
        "Run `pip install 'fake-kernels>=0.6.14'`."
    ]


def test_a14_a_wrong_version_names_both(folder: Path, request_: Request) -> None:
    needs = "requirements=(Requirement('fake_kernels', 'fake-kernels', 'pip install x', '>=0.6.9'),),"
    needs += " capabilities="
    install_backend(
        folder, "acme", altered(("capabilities=", needs), ("hookimpl,\n", "hookimpl, Requirement,\n"))
    )
    metadata = folder / "fake_kernels-0.6.3.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-kernels\nVersion: 0.6.3\n")
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, "acme")
    assert reasons_of(caught, "acme") == [
        "[package-version] It needs fake-kernels>=0.6.9, and fake-kernels 0.6.3 is installed. "
        "Run `pip install x`."
    ]


def test_a15_a_kernel_that_does_not_compile_is_named_with_its_layer(folder: Path, request_: Request) -> None:
    compiles = (
        '    return ("layer"',
        "    raise RuntimeError('nvcc: out of registers')\n" + '    return ("layer"',
    )
    install_backend(folder, "acme", altered(compiles))
    spec = LayerSpec(7, C4A, request_.model, num_heads=16)
    with pytest.raises(RuntimeError, match="nvcc: out of registers") as caught:
        bind_layer(select(request_, "acme"), spec, "weights", "cpu")  # type: ignore[arg-type]
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [
            "in dsv4_init_layer_buffers of backend 'acme' (fake-acme 1.0), layer 7 (c4a)"
        ]
