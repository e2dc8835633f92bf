from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4core.cli.main import main
from dsv4core.model.shapes import PRESETS, to_config
from dsv4core.testing.fakes import altered, install_backend

Capture = pytest.CaptureFixture[str]
CPU = ("device=cpu", "backend.order.cpu=[acme]")


def report(capsys: Capture, *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["explain", "device=cpu", "--json", *words]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_json_of_a_choice(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "acme")
    result = report(capsys, "backend.order.cpu=[acme]", "kv_cache_dtype=bf16", "model=v4_flash")
    assert list(result) == ["request", "chosen", "decisions", "kv_cache", "plan", "selection", "config"]
    assert result["chosen"] == "acme"
    assert result["decisions"] == [{"backend": "acme", "verdict": "chosen", "reasons": []}]
    assert result["kv_cache"]["window"] == {"name": "bf16", "bytes_per_token": 1024}
    assert result["plan"]["c4a"]["padded_q_heads"] == 64
    assert result["plan"]["c4a"]["own_ops"] == []
    request = result["request"]
    assert (request["platform"], request["kv_cache_dtype"], request["num_heads"]) == ("cpu", "bf16", 64)
    assert request["probe"] == "static"


def test_json_of_a_refusal(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "acme")
    install_backend(folder, "broken", "raise OSError('lib')")
    module = folder / "fake_broken.py"
    expected = {
        "flashmla": {
            "code": "package-missing",
            "text": "Backend 'flashmla' is not installed.",
            "fix": "Run `pip install dsv4-plugin-flashmla`.",
        },
        "broken": {
            "code": "broken",
            "text": f"Backend 'broken' of fake-broken 1.0 cannot be loaded: OSError: lib ({module}, line 1).",
            "fix": "Repair or uninstall fake-broken; DSV4_STRICT=1 shows the traceback.",
        },
    }
    for name, reason in expected.items():
        result = report(capsys, f"backend={name}", "backend.option=1", code=2)
        assert (result["chosen"], result["kv_cache"], result["plan"]) == (None, None, None)
        assert result["decisions"][0] == {"backend": name, "verdict": "rejected", "reasons": [reason]}
        assert {"backend": "acme", "verdict": "could-run", "reasons": []} in result["decisions"]


def test_every_key_is_listed_with_its_source(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "acme")
    usual = report(capsys, "backend=acme")["config"]
    assert {facts["source"] for key, facts in usual.items() if key not in ("device", "json")} == {"default"}
    assert usual["backend.workspace_mib"] == {"value": 64, "source": "default"}
    assert usual["request.arch"] == {"value": None, "source": "default"}
    changed = report(capsys, "backend=acme", "backend.workspace_mib=3")["config"]
    assert changed.pop("backend.workspace_mib") == {"value": 3, "source": "set"}
    assert changed.items() <= usual.items()


def test_another_machine(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "acme", altered(('("cpu",)', '("cuda",)')))
    result = report(capsys, "backend=acme", "request.arch=sm_100")
    assert (result["request"]["platform"], result["request"]["arch"]) == ("cuda", "sm_100")
    assert result["chosen"] == "acme"
    here = report(capsys, "backend=acme", code=2)
    assert (
        here["decisions"][0]["reasons"][0]["text"] == "It has kernels for cuda, and the request is for cpu."
    )


def test_an_engines_request(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "acme", altered(("frozenset(),", "frozenset({'kernel-seam', 'graph'}),")))
    engine = ["request.seam=kernel", "request.graph=true"]
    assert report(capsys, "backend=acme", *engine)["chosen"] == "acme"
    result = report(capsys, "backend=acme", *engine, "request.tensor_parallel=2", code=2)
    assert result["request"]["num_heads"] == 8
    assert result["decisions"][0]["reasons"][0]["code"] == "capability"


PROBES = """    if request.probe == "host":
        import kernels_of_acme
    return []
"""


def test_only_a_host_probe_looks_for_the_kernels(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "acme", altered(("    return []\n", PROBES)))
    assert report(capsys, "backend=acme")["chosen"] == "acme"
    result = report(capsys, "backend=acme", "request.probe=host", code=2)
    assert result["decisions"][0]["reasons"][0]["text"].startswith(
        "Its checks raised ModuleNotFoundError: No module named 'kernels_of_acme' ("
    )


def test_auto_that_finds_nothing(folder: Path, capsys: Capture) -> None:
    result = report(capsys, code=2)
    assert result["chosen"] is None
    assert [decision["backend"] for decision in result["decisions"]] == ["reference"]


def test_the_checkpoint_decides_about_the_model(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "acme")
    (folder / "config.json").write_text(json.dumps(to_config(PRESETS["v4_pro"])))
    result = report(capsys, "backend=acme", f"checkpoint={folder}", "model=tiny")
    assert result["request"]["model"]["num_attention_heads"] == 128


def test_text(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "acme", altered(("own_ops=frozenset()", "variant='v1'")))
    assert main(["explain", *CPU]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny on cpu (device=cpu; torch was not asked)"
    assert lines[3].split() == ["acme", "chosen"]
    assert lines[-5:] == [
        "Not the defaults: backend.order.cpu=['acme'], device=cpu",
        "KV caches, bytes a row: window bf16 1024 B, compressed bf16 1024 B, index bf16 1024 B, "
        "state bf16 1024 B",
        *(
            f"{kind}: 16 query heads of bfloat16, dense output, 0 B of workspace, variant v1"
            for kind in ("swa", "c4a", "c128a")
        ),
    ]


def test_text_of_a_refusal(folder: Path, capsys: Capture) -> None:
    assert main(["explain", "device=cpu"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split()[:3] == ["reference", "rejected", "[package-missing]"]
    assert lines[-2:] == [
        "Not the defaults: device=cpu",
        "Nothing was chosen. Name a backend with backend=NAME, or list some in backend.order.",
    ]


def test_notes_of_plans(folder: Path, capsys: Capture) -> None:
    """Each once; those of some kinds name them."""
    own = "notes=('acme 1.2', *(('sums in fp32',) if layer.kind.ratio else ())), own_ops="
    install_backend(folder, "acme", altered(("own_ops=", own)))
    assert main(["explain", *CPU, "model=v4_flash"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["acme 1.2", "c4a, c128a: sums in fp32"]
    assert report(capsys, *CPU[1:], "model=v4_flash")["plan"]["swa"]["notes"] == ["acme 1.2"]
