"""The file for a report: every command is run and kept, whatever the others say."""

from __future__ import annotations

import itertools
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dsv4_plugin_rocm_aiter import report
from dsv4_plugin_rocm_aiter.library import Aiter
from dsv4_plugin_rocm_aiter.routes import OPERATIONS, Asked, routes
from stub_aiter import Calls, Install, Stub

from dsv4core.api import C4A, C128A, SWA, ConfigError
from dsv4core.cli.configuration import configuration
from dsv4core.cli.main import COMMANDS
from dsv4core.cli.run import planned_chunks
from dsv4core.framework.request import build_limits
from dsv4core.testing.case import Case
from dsv4core.testing.layers import backend_stack, hidden_states


def read(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        members = {own.name: archive.extractfile(own) for own in archive.getmembers()}
        return {name: file.read().decode() for name, file in members.items() if file is not None}


def test_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command that succeeds and one that fails; versions, and only variables that matter."""
    commands = {"plugins.json": ("plugins", "--json"), "run.json": ("run", "device=nothing")}
    monkeypatch.setattr(report, "COMMANDS", commands)
    monkeypatch.setenv("AITER_LOG_LEVEL", "WARNING")
    monkeypatch.setenv("HOME_OF_SECRETS", "hush")
    assert report.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "ok: dsv4 plugins --json\nexit code 2: dsv4 run device=nothing\n" in said
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("dsv4-rocm-aiter-")
    assert f"Attach {path} to a report" in said
    files = read(path)
    assert {row["name"] for row in json.loads(files["plugins.json"])} >= {"rocm_aiter", "triton"}
    assert "device=nothing is not a torch device" in files["run.json.stderr"]
    contents = json.loads(files["report.json"])
    assert [step["code"] for step in contents["steps"]] == [0, 2]
    assert {"dsv4core", "dsv4-plugin-rocm-aiter", "torch"} <= contents["packages"].keys()
    assert contents["variables"]["AITER_LOG_LEVEL"] == "WARNING"
    assert "hush" not in "".join(files.values())


def test_the_commands() -> None:
    """Those of `dsv4`, on this backend; the suite is among them, and what is left to the core exists."""
    assert {words[0] for words in report.COMMANDS.values()} <= set(COMMANDS)
    assert ("check", "rocm_aiter", "--json") in report.COMMANDS.values()
    assert all(any("rocm_aiter" in word for word in words) for words in report.COMMANDS.values())
    left = [word for words in report.COMMANDS.values() for word in words if word.startswith("backend.core=")]
    for word in left:
        assert set(word.partition("=")[2].strip("[]").split(",")) <= set(OPERATIONS)


def explained(code: int, decisions: list[dict[str, object]]) -> report.Step:
    return report.Step("explain.json", "dsv4 explain", code, json.dumps({"decisions": decisions}), "")


def test_where_it_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason comes first; a check that could only look at the contract is not ok, whatever its code."""
    reason = {"code": "platform", "text": "It is for rocm, and this is cpu.", "fix": "Use another."}
    other = {"backend": "triton", "verdict": "rejected", "reasons": [{"text": "No GPU.", "fix": None}]}
    own = {"backend": "rocm_aiter", "verdict": "rejected", "reasons": [reason, reason | {"fix": None}]}
    checked = report.Step("check.json", "dsv4 check", 0, '{"ok": true, "complete": false}', "")
    monkeypatch.setattr(report, "steps", lambda: [explained(2, [own, other]), checked])
    assert report.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith(
        "backend=rocm_aiter cannot run here. It is for rocm, and this is cpu. Use another. "
        "It is for rocm, and this is cpu.\nexit code 2: dsv4 explain\nincomplete: dsv4 check\nAttach "
    )
    monkeypatch.setattr(report, "steps", lambda: [explained(0, []), checked])
    assert report.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("ok: dsv4 explain\nincomplete: dsv4 check\n")
    failed = report.Step("explain.json", "dsv4 explain", 1, "", "dsv4: model=x is not known.\n")
    assert report.why_not([failed]) == "backend=rocm_aiter cannot run here. dsv4: model=x is not known."
    complete = report.Step("check.json", "dsv4 check", 0, '{"complete": true}', "")
    monkeypatch.setattr(report, "steps", lambda: [explained(0, []), complete])
    assert report.main([str(tmp_path)]) == 0


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that compute nothing: which are called depends on sizes alone, and these are large."""

    def flat(self: Stub, Q: torch.Tensor, KV: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.zeros(len(Q), len(KV))

    def leading(self: Stub, indices: torch.Tensor, rowEnds: torch.Tensor, k: int, **_: object) -> None:
        column = torch.arange(k, dtype=torch.int32)
        indices.copy_(torch.where(column < rowEnds[:, None], column, -1))

    def nothing(self: Stub, q: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.zeros_like(q)

    for name in ("pa_decode_sparse", "pa_sparse_prefill_opus"):
        monkeypatch.setattr(Stub, name, nothing)
    for name in ("_sparse_attn_prefill_kernel", "sparse_attn_prefill"):
        monkeypatch.setattr(Stub, name, lambda self, *grid, **own: None)
    monkeypatch.setattr(Stub, "fp8_mqa_logits", flat)
    monkeypatch.setattr(Stub, "top_k_per_row_prefill", leading)


@pytest.mark.parametrize(
    ("arch", "version"), [("gfx942", "0.1.19"), ("gfx942", "0.1.20"), ("gfx950", "0.1.20")]
)
def test_every_route_is_run(install: Install, idle: None, called: Calls, arch: str, version: str) -> None:
    """The runs' steps, of one prompt with fewer heads and narrower projections, on a layer of each kind."""
    subject, reachable = install(arch, version), set()
    for words in (own for own in report.COMMANDS.values() if own[0] == "run"):
        config = configuration([*(word for word in words[1:] if word != "--json"), "batch=1"])
        limits, format = build_limits(config), config.kv_cache_dtype
        case = Case(SWA, 8, format, limits=limits, private_output=True, host_lengths=True)
        stack = backend_stack(subject, replace(case, others=(C4A, C128A), poison=None))
        for plan in stack.selection.plans.values():
            reachable |= {own.name for own in map(plan.symbol, plan.routes) if own is not None}
        for chunk in planned_chunks(config)[: -config.decode + 1]:
            step = stack.plan([chunk.start] * config.batch, [chunk.tokens] * config.batch)
            for layer in stack.layers:
                stack.attend(layer, hidden_states(step.num_tokens, stack), step)
    assert set(called) == reachable
    layouts = itertools.product(("fp8_ds_mla", "bf16"), (1, 2))
    asked = (Asked(arch, layout, "index_fp8", pools, 8, 512**-0.5) for layout, pools in layouts)
    known = [route for own in asked for route in routes(own, Aiter(version)).values()]
    assert reachable == {route.symbol.name for route in known if route.symbol is not None}


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is no folder; write one, or nothing for this one."):
        report.main([str(tmp_path / "nowhere")])
