"""What a user sees of a selection, word for word: reasons, one line of auto, the order of a machine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from terminal import Capture, error, explain

from dsv4core.api import REASON_CODES, Limits, Reason, Request
from dsv4core.cli.main import main
from dsv4core.model.shapes import PRESETS
from dsv4core.testing.fakes import altered, install_backend

REASONS = "def dsv4_unsupported_reasons(request):\n    return []"
IMPORT_REASON = ("hookimpl,\n", "hookimpl, Reason,\n")
REFUSES = REASONS.replace("[]", "[Reason('q-heads', 'It serves 8 heads, not 16.', 'Use more ranks.')]")


def test_a_named_backend_gives_its_reasons_and_is_never_replaced(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "bad", altered((REASONS, REFUSES), IMPORT_REASON))
    install_backend(folder, "good")
    words = ["device=cpu", "backend=bad", "backend.workspace_mib=3"]
    assert error(capsys, "run", *words) == (
        "backend=bad cannot run this request: [q-heads] It serves 8 heads, not 16. Use more ranks. "
        "What could run here, if you name it: good."
    )
    report = explain(capsys, *words, code=2)
    reason = {"code": "q-heads", "text": "It serves 8 heads, not 16.", "fix": "Use more ranks."}
    assert report["decisions"] == [
        {"backend": "bad", "verdict": "rejected", "reasons": [reason]},
        {"backend": "good", "verdict": "could-run", "reasons": []},
    ]


ABSENT = [
    ("flashmla", "Backend 'flashmla' is not installed. Run `pip install dsv4-plugin-flashmla`."),
    ("flashmal", "No backend is named 'flashmal'. Did you mean 'flashmla'?"),
    (
        "cutlass",
        "No backend is named 'cutlass'. The names are: auto, flashinfer, flashmla, good, hopper, rocm_aiter.",
    ),
]


@pytest.mark.parametrize(("name", "text"), ABSENT)
def test_an_absent_backend(folder: Path, capsys: Capture, name: str, text: str) -> None:
    install_backend(folder, "good")
    assert error(capsys, "run", "device=cpu", f"backend={name}") == (
        f"backend={name} cannot run this request: [package-missing] {text} "
        "What could run here, if you name it: good."
    )


def test_auto_says_what_it_chose_and_what_it_passed_over_in_one_line(
    folder: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    install_backend(folder, "bad", altered((REASONS, REFUSES), IMPORT_REASON))
    install_backend(folder, "good")
    install_backend(folder, "other")
    caplog.set_level(logging.INFO)
    logging.getLogger("dsv4core").setLevel(logging.INFO)
    with caplog.at_level(logging.INFO, logger="dsv4core.framework.selection"):
        explain(capsys, "backend.order.cpu=[flashmla,bad,good]")
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert caplog.messages == [
        "backend=auto chose good (fake-good 1.0); passed over: "
        "flashmla: [package-missing] Backend 'flashmla' is not installed. "
        "Run `pip install dsv4-plugin-flashmla`; "
        "bad: [q-heads] It serves 8 heads, not 16. Use more ranks; "
        "other: [not-in-order] It is installed, but auto does not try it. Ask for backend=other."
    ]


def test_auto_finds_nothing_on_a_gpu_that_no_kernel_is_for(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "reference")
    assert main(["explain", "request.arch=gfx90a"]) == 2
    assert " ".join(capsys.readouterr().out.split()) == (
        "tiny on rocm gfx90a (as asked) backend verdict reasons "
        "reference rejected [not-in-order] It is installed, but auto does not try it. "
        "Ask for backend=reference. Not the defaults: request.arch=gfx90a "
        "Nothing was chosen. Name a backend with backend=NAME, or list some in backend.order."
    )


def test_installing_a_package_changes_nothing(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "reference")
    before = explain(capsys)
    install_backend(folder, "acme")
    after = explain(capsys)
    assert (before["chosen"], after["chosen"]) == ("reference", "reference")
    assert before["plan"] == after["plan"]


def test_the_order_may_depend_on_machine_and_heads(folder: Path, capsys: Capture) -> None:
    for name in ("any", "gpu", "hopper", "narrow"):
        install_backend(
            folder, name, altered(('("cpu",)', '("cuda",)'), ("frozenset(),", "TENSOR_PARALLEL,"))
        )
        module = folder / f"fake_{name}.py"
        module.write_text("TENSOR_PARALLEL = frozenset({'tensor-parallel'})\n" + module.read_text())
    orders = [
        "backend.order.cuda=[any]",
        "backend.order.cuda_heads_8=[gpu]",
        "backend.order.sm_90=[hopper]",
        "backend.order.sm_90_heads_8=[narrow]",
    ]
    chosen = {
        (arch, ranks): explain(capsys, *orders, f"request.arch={arch}", f"request.tensor_parallel={ranks}")[
            "chosen"
        ]
        for arch in ("sm_80", "sm_90")
        for ranks in (1, 2)
    }
    assert chosen == {
        ("sm_80", 1): "any",
        ("sm_80", 2): "gpu",
        ("sm_90", 1): "hopper",
        ("sm_90", 2): "narrow",
    }


CODES = """
platform arch package-missing package-wrong package-version artifact-missing kv-dtype layout q-heads head-dim
block-size capability model parallel option probe-error broken api conflict disabled not-in-order
"""


def test_reasons_have_codes_from_a_closed_list() -> None:
    assert list(REASON_CODES) == CODES.split()
    with pytest.raises(
        ValueError, match=r"^reason code 'heads' is not known; the codes are: platform, arch, "
    ):
        Reason("heads", "It serves 8.")


def test_a_request_is_plain_frozen_data() -> None:
    request = Request("cpu", "", PRESETS["tiny"], num_heads=16, limits=Limits(512, 2, 316, 256))
    assert hash(request) == hash(Request(**vars(request)))
    with pytest.raises(AttributeError):
        request.arch = "sm_90"  # type: ignore[misc]
