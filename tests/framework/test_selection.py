from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4core.api import (
    BackendOptions,
    BackendUnavailable,
    ConfigError,
    Decision,
    PageSizes,
    Reason,
    Request,
)
from dsv4core.framework.selection import select
from dsv4core.testing.fakes import FAKE_BACKEND, altered, install_backend

Install = Callable[..., None]

NO_REASONS = "def dsv4_unsupported_reasons(request):\n    return []"
TOO_MANY = NO_REASONS.replace("[]", "[R('q-heads', 'It serves 8 heads, not 16.', 'Use another model.')]")
RAISES = NO_REASONS.replace("return []", "raise OSError('no driver')")
REFUSES = "def dsv4_resolve_kv_cache(request):\n    raise C('kv_cache_dtype=auto is not mine; use fp8.')\n"


@pytest.fixture
def install(folder: Path) -> Install:
    def install(name: str, *replacements: tuple[str, str]) -> None:
        source = "from dsv4core.api import ConfigError as C, Reason as R\n" + FAKE_BACKEND
        install_backend(folder, name, altered(*replacements, source=source))

    return install


def order(*names: str) -> dict[str, list[str]]:
    return {"cpu": list(names)}


def reasons(error: pytest.ExceptionInfo[BackendUnavailable], name: str) -> list[str]:
    decisions = {decision.backend: decision for decision in error.value.decisions}
    return [str(reason) for reason in decisions[name].reasons]


def test_a_named_backend_is_chosen(
    install: Install, request_: Request, caplog: pytest.LogCaptureFixture
) -> None:
    install("acme")
    caplog.set_level(logging.DEBUG, logger="dsv4core")
    selection = select(request_, "acme")
    assert selection.backend.name == "acme"
    assert selection.request is request_
    assert selection.options == selection.backend.info.options(name="acme")
    assert selection.layout.window.name == "bf16"
    assert {name: plan.padded_q_heads for name, plan in selection.plans.items()} == {
        "swa": 16,
        "c4a": 16,
        "c128a": 16,
    }
    assert selection.decisions == (Decision("acme", "chosen"),)
    assert caplog.messages == ["backend=acme runs, as asked: fake-acme 1.0."]


def test_options_reach_every_hook(install: Install, request_: Request) -> None:
    install(
        "acme",
        ("dsv4_plan_layer(layer)", "dsv4_plan_layer(layer, options)"),
        ('"bfloat16", own', '"bfloat16", workspace_bytes=options.workspace_mib << 20, own'),
    )
    options = select(request_, "acme").backend.info.options(name="acme", workspace_mib=2)  # type: ignore[call-arg]
    selection = select(request_, "acme", options)
    assert selection.options is options
    assert selection.plans["swa"].workspace_bytes == 2 << 20


def test_options_of_another_class_are_refused(install: Install, request_: Request) -> None:
    install("acme")
    with pytest.raises(ConfigError) as caught:
        select(request_, "acme", BackendOptions(name="acme"))
    assert str(caught.value) == "backend=acme takes options of Options, and was given BackendOptions."


def test_auto_takes_no_options(install: Install, request_: Request) -> None:
    with pytest.raises(ConfigError) as caught:
        select(request_, options=BackendOptions())
    assert str(caught.value) == "Options belong to a named backend, and backend=auto names none; name it."


def test_a_named_backend_that_cannot_is_never_replaced(install: Install, request_: Request) -> None:
    install("acme", (NO_REASONS, TOO_MANY))
    install("able")
    install("broken", ("import dataclass", "import nothing"))
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, "acme", order=order("able"))
    assert str(caught.value) == (
        "backend=acme cannot run this request: [q-heads] It serves 8 heads, not 16. Use another model. "
        "What could run here, if you name it: able."
    )
    assert isinstance(caught.value, BackendUnavailable)
    verdicts = [(decision.backend, decision.verdict) for decision in caught.value.decisions]
    assert verdicts == [("acme", "rejected"), ("able", "could-run"), ("broken", "rejected")]


ABSENT = [
    ("flashmla", "Backend 'flashmla' is not installed. Run `pip install dsv4-plugin-flashmla`."),
    ("acne", "No backend is named 'acne'. Did you mean 'acme'?"),
]


@pytest.mark.parametrize(("name", "text"), ABSENT)
def test_a_named_backend_that_is_absent(install: Install, request_: Request, name: str, text: str) -> None:
    install("acme", (NO_REASONS, TOO_MANY))
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, name)
    assert str(caught.value) == (
        f"backend={name} cannot run this request: [package-missing] {text} "
        "What could run here, if you name it: nothing that is installed."
    )


def test_a_named_backend_that_is_broken(install: Install, request_: Request) -> None:
    install("acme", ("import dataclass", "import nothing"))
    with pytest.raises(
        BackendUnavailable, match=r"\[broken\] Backend 'acme' of fake-acme 1\.0 cannot be loaded"
    ):
        select(request_, "acme")


def test_auto_walks_the_order(install: Install, request_: Request, caplog: pytest.LogCaptureFixture) -> None:
    install("first", (NO_REASONS, TOO_MANY))
    install("second")
    install("third", ("import dataclass", "import nothing"))
    install("unlisted", ("import dataclass", "import nothing"))
    caplog.set_level(logging.INFO)
    selection = select(request_, order=order("flashmla", "first", "second", "third"))
    assert selection.backend.name == "second"
    assert [(decision.backend, decision.verdict) for decision in selection.decisions] == [
        ("flashmla", "rejected"),
        ("first", "rejected"),
        ("second", "chosen"),
        ("third", "not-reached"),
        ("unlisted", "rejected"),
    ]
    assert caplog.messages == [
        "backend=auto chose second (fake-second 1.0); passed over: "
        "flashmla: [package-missing] Backend 'flashmla' is not installed. "
        "Run `pip install dsv4-plugin-flashmla`; "
        "first: [q-heads] It serves 8 heads, not 16. Use another model; "
        "unlisted: [not-in-order] It is installed, but auto does not try it. Ask for backend=unlisted."
    ]


def test_installing_a_package_changes_nothing(install: Install, request_: Request) -> None:
    install("acme")
    with pytest.raises(BackendUnavailable) as caught:
        select(request_)
    assert reasons(caught, "acme") == [
        "[not-in-order] It is installed, but auto does not try it. Ask for backend=acme."
    ]
    assert reasons(caught, "reference") == [
        "[package-missing] No backend is named 'reference'. The names are: acme, auto, flashinfer, flashmla, "
        "hopper, rocm_aiter."
    ]


def test_auto_with_nothing(install: Install, request_: Request) -> None:
    install("acme", (NO_REASONS, TOO_MANY))
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, order=order("acme", "hopper"))
    assert str(caught.value).splitlines() == [
        "backend=auto found no backend for cpu: none of acme, hopper can run this request.",
        "  request: num_heads=16, kv_cache_dtype=auto, index_dtype=auto, dtype=bfloat16, tensor_parallel=1, "
        "seam=layer, graph=False",
        "  acme: [q-heads] It serves 8 heads, not 16. Use another model.",
        "  hopper: [package-missing] Backend 'hopper' is not installed. "
        "Run `pip install dsv4-plugin-hopper`.",
        "Name a backend with backend=NAME, or list some in backend.order.cpu; backend=reference computes "
        "everything, slowly.",
    ]


def test_auto_with_an_empty_order(install: Install, request_: Request) -> None:
    install("acme")
    with pytest.raises(BackendUnavailable) as caught:
        select(replace(request_, platform="cuda", arch="sm_90"), order={"cuda": []})
    assert (
        str(caught.value).splitlines()[0]
        == "backend=auto found no backend for cuda sm_90: its order is empty."
    )


def test_disable(install: Install, request_: Request) -> None:
    install("acme")
    install("other")
    selection = select(request_, order=order("acme", "other"), disable=["acme"])
    assert selection.backend.name == "other"
    disabled = Reason("disabled", "Backend 'acme' is disabled.", "Take 'acme' out of plugins.disable.")
    assert selection.decisions[0] == Decision("acme", "rejected", (disabled,))
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, "acme", disable=["acme"])
    assert str(caught.value) == (
        "backend=acme cannot run this request: [disabled] Backend 'acme' is disabled. "
        "Take 'acme' out of plugins.disable. What could run here, if you name it: other."
    )


DEFECTS = [("import dataclass", "import nothing"), (NO_REASONS, RAISES), ("api=API_VERSION", "api=9")]


@pytest.mark.parametrize("defect", DEFECTS)
def test_passing_over_a_defective_package_is_a_warning(
    install: Install, request_: Request, caplog: pytest.LogCaptureFixture, defect: tuple[str, str]
) -> None:
    install("acme", defect)
    install("other")
    install("unlisted", defect)
    caplog.set_level(logging.INFO)
    select(request_, order=order("acme", "other"))
    select(request_, order=order("other"))
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    assert caplog.messages[0].startswith("backend=auto chose other (fake-other 1.0); passed over: acme: [")


def test_a_probe_that_raises_is_a_rejection(folder: Path, install: Install, request_: Request) -> None:
    install("acme", (NO_REASONS, RAISES))
    install("other")
    selection = select(request_, order=order("acme", "other"))
    assert selection.backend.name == "other"
    assert [str(reason) for reason in selection.decisions[0].reasons] == [
        f"[probe-error] Its checks raised OSError: no driver ({folder / 'fake_acme.py'}, line 35). "
        "DSV4_STRICT=1 shows the traceback."
    ]


def test_strict_lets_a_probe_raise(
    install: Install, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme", (NO_REASONS, RAISES))
    monkeypatch.setenv("DSV4_STRICT", "1")
    with pytest.raises(OSError, match="no driver"):
        select(request_, order=order("acme"))


def test_a_disabled_backend_is_passed_over_even_if_strict(
    install: Install, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme")
    install("other")
    monkeypatch.setenv("DSV4_STRICT", "1")
    monkeypatch.setenv("DSV4_DISABLE", "acme")
    assert select(request_, order=order("acme", "other")).backend.name == "other"


def test_a_refused_dtype_is_a_reason(
    install: Install, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme", ("def dsv4_resolve_kv_cache(request):\n", REFUSES))
    install("other")
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, "acme")
    assert str(caught.value) == (
        "backend=acme cannot run this request: [kv-dtype] kv_cache_dtype=auto is not mine; use fp8. "
        "What could run here, if you name it: other."
    )
    monkeypatch.setenv("DSV4_STRICT", "1")
    selection = select(request_, order=order("acme", "other"))
    assert selection.decisions[0].reasons == (
        Reason("kv-dtype", "kv_cache_dtype=auto is not mine; use fp8."),
    )


OPTION = "raise C('workspace_mib=64 is too little for 16 heads; use 128.')"
WHERE = [
    ("    return []\n", f"    {OPTION}\n"),
    ("    return LayerPlan(", f"    {OPTION}\n    return LayerPlan("),
]


@pytest.mark.parametrize("where", WHERE)
def test_a_refused_option_is_a_reason(install: Install, request_: Request, where: tuple[str, str]) -> None:
    install("acme", where)
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, "acme")
    assert reasons(caught, "acme") == ["[option] workspace_mib=64 is too little for 16 heads; use 128."]


def test_a_list_of_names_is_no_name(install: Install, request_: Request) -> None:
    install("acme")
    with pytest.raises(ConfigError) as caught:
        select(request_, "acme", disable="acme")
    assert str(caught.value) == "disable='acme' is no list of backends; write ['acme']."


def test_a_summary_is_plain_data(install: Install, request_: Request) -> None:
    install("acme", ("own_ops=frozenset()", "variant='split-KV'"))
    summary = select(request_, "acme").summary()
    assert (
        json.loads(json.dumps(summary))
        == summary
        == {
            "backend": "acme",
            "distribution": "fake-acme",
            "version": "1.0",
            "options": {"workspace_mib": 64},
            "kv_cache": dict.fromkeys(("window", "compressed", "index", "state"), "bf16"),
            "variants": dict.fromkeys(("swa", "c4a", "c128a"), "split-KV"),
        }
    )


def test_auto_does_not_commit_before_it_has_plans(folder: Path, install: Install, request_: Request) -> None:
    install("acme", ("return LayerPlan(", "1 / 0\n    return LayerPlan("))
    install("other")
    selection = select(request_, order=order("acme", "other"))
    assert selection.backend.name == "other"
    assert [str(reason) for reason in selection.decisions[0].reasons] == [
        "[probe-error] Its checks raised ZeroDivisionError: division by zero "
        f"({folder / 'fake_acme.py'}, line 46). DSV4_STRICT=1 shows the traceback."
    ]


def test_platform(install: Install, request_: Request) -> None:
    install("acme", ('("cpu",)', '("cuda", "rocm")'), (NO_REASONS, RAISES))
    with pytest.raises(BackendUnavailable) as caught:
        select(request_, "acme")
    assert reasons(caught, "acme") == [
        "[platform] It has kernels for cuda, rocm, and the request is for cpu."
    ]


def test_a_request_that_contradicts_itself(install: Install, request_: Request) -> None:
    with pytest.raises(ConfigError) as caught:
        select(replace(request_, tensor_parallel=2))
    assert str(caught.value) == (
        "num_heads=16 is asked for, but each of 2 ranks has 8 of the model's 16 heads; give that number."
    )
    with pytest.raises(ConfigError, match="does not divide num_attention_heads"):
        select(replace(request_, tensor_parallel=3))
    with pytest.raises(ConfigError) as caught:
        select(replace(request_, page_sizes=PageSizes(context=100)))
    assert str(caught.value) == (
        "a context page of 100 tokens is not a whole number of 128-token entries; choose a multiple of 128."
    )
