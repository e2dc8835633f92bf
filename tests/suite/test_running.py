"""The suite as its users run it: by `dsv4 check`, by pytest, by a star import."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4core.api import ConfigError, Reason, hookimpl
from dsv4core.backends import reference
from dsv4core.cli.check import _verdict
from dsv4core.cli.main import main
from dsv4core.testing.conformance import Checked, Conformance, run_suite
from dsv4core.testing.fakes import declare_backends
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import MODULES, checks
from dsv4core.testing.suite.marks import LEVELS
from tests.suite.mutants import MUTANTS, Hooks

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]


class Elsewhere(Hooks):
    """A backend for machines that this one is not."""

    @hookimpl
    def dsv4_backend_info(self):
        return replace(reference.dsv4_backend_info(), platforms=("xpu",))


class Undeclared(Hooks):
    """It declares nothing but the kernel seam."""

    @hookimpl
    def dsv4_backend_info(self):
        return replace(reference.dsv4_backend_info(), capabilities=frozenset({"kernel-seam"}))


class ForFewHeads(Hooks):
    """It turns down what every backend has to serve."""

    @hookimpl
    def dsv4_unsupported_reasons(self, request):
        return [Reason("q-heads", "Too many heads.", "Use 16.")] if request.num_heads > 16 else []


class Dies(Hooks):
    """It takes its process with it, as a fault in a kernel library does."""

    @hookimpl
    def dsv4_forward_mqa(self):
        os._exit(139)


class Hangs(Hooks):
    """It never returns."""

    @hookimpl
    def dsv4_forward_mqa(self):
        time.sleep(3600)


elsewhere, undeclared, few, sink_ignored = Elsewhere(), Undeclared(), ForFewHeads(), MUTANTS["SinkIgnored"]()
dies, hangs = Dies(), Hangs()
BACKENDS = ("elsewhere", "undeclared", "few", "sink_ignored", "dies", "hangs")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with metadata of these backends."""
    declare_backends(tmp_path, "acme", {name: f"tests.suite.test_running:{name}" for name in BACKENDS})
    return tmp_path


def dsv4_check(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """As users run it: the suite starts processes of its own."""
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "from dsv4core.cli.main import main; exit(main())", "check", *words]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True)


def found_by(site: Path, name: str, only: str, *words: str) -> dict[str, dict[str, Any]]:
    """What became of some checks, by name."""
    done = dsv4_check(site, name, "--only", only, "--json", *words)
    assert done.stdout, done.stderr
    return {own["name"]: own for own in json.loads(done.stdout)["checks"]}


def test_a_failure_ends_with_1_and_says_how_to_see_it_again(site: Path) -> None:
    done = dsv4_check(site, "sink_ignored", "--only", "test_sinks or test_info")
    assert done.returncode == 1
    assert "sink_ignored (acme 1.0) on cpu, bfloat16" in done.stdout
    assert "failed: The attention output is off in" in done.stdout
    assert "  L3 test_sinks\n  dsv4 check sink_ignored --only 'test_sinks'\n" in done.stdout
    assert done.stdout.endswith("sink_ignored does not conform: 1 check failed.\n")


def test_json(capsys: Capture) -> None:
    assert main(["check", "reference", "--json", "--quick", "--only", "test_widths or test_info"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["backend"], found["ok"], found["complete"]) == ("reference", True, False)
    assert found["levels"]["L3"] == {
        **dict.fromkeys(("core", "failed", "refused", "undeclared", "elsewhere"), 0),
        "passed": 10,
        "large": 1,
    }
    assert found["coverage"]["heads"] == [8]
    assert found["coverage"]["kv_format"] == ["fp8_ds_mla"]
    left_out = [own for own in found["checks"] if own["outcome"] == "large"]
    assert [(own["name"], own["level"]) for own in left_out] == [("test_widths[8192]", "L3")]


def test_what_another_machine_could_show(site: Path) -> None:
    done = dsv4_check(site, "elsewhere", "--only", "test_sinks or test_info")
    assert done.returncode == 0
    assert "elsewhere: [platform] It has kernels for xpu, and the request is for cpu." in done.stdout


VERDICTS = [
    ([("L0", "passed"), ("L3", "passed")], "reference conforms on cpu."),
    ([("L0", "passed"), ("L3", "failed")], "reference does not conform: 1 check failed."),
    ([("L0", "passed"), ("L3", "elsewhere")], "reference cannot run on cpu: only its contract was checked."),
    (
        [("L0", "passed"), ("L3", "passed"), ("L4", "elsewhere"), ("L3", "large")],
        "reference conforms on cpu, as far as it was checked: 1 check left out as large and 1 check for "
        "another machine or library.",
    ),
]


@pytest.mark.parametrize(("outcomes", "text"), VERDICTS)
def test_verdicts(outcomes: list[tuple[str, Any]], text: str) -> None:
    checked = tuple(Checked("test_a", level, outcome) for level, outcome in outcomes)
    assert _verdict(Conformance(Subject("reference"), checked), "cpu") == text


def test_what_is_declared_has_to_be_shown() -> None:
    """A capability of which every check was refused is not proven by the others."""
    refused = Checked("test_log_sum_exp[swa]", "L3", "refused", "heads", needs=("lse",))
    found = Conformance(Subject("reference"), (Checked("test_sinks", "L3", "passed"), refused))
    assert not found.ok
    assert (
        _verdict(found, "cpu")
        == "reference does not conform: it declares lse, and refuses every check of it."
    )


def test_an_expression_that_is_none(site: Path) -> None:
    done = dsv4_check(site, "reference", "--only", "a b")
    assert done.returncode == 2
    assert "--only 'a b' is none of pytest's expressions" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_name_is_an_expression(site: Path) -> None:
    """What `dsv4 check` prints to see a failure again."""
    words = ("--collect-only", "-q", "--pyargs", "dsv4core.testing.suite")
    listed = [line.partition("::")[2] for line in pytest_run(site, *words)[1].splitlines() if "::" in line]
    assert len(listed) > 300
    assert [name for name in listed if not re.fullmatch(r"[\w.\-\[\]]+", name)] == []


def test_some_checks_are_no_verdict(capsys: Capture) -> None:
    assert main(["check", "reference", "--only", "test_sinks"]) == 0
    assert capsys.readouterr().out.endswith("1 check passed, of those that --only names; no verdict.\n")


def test_what_is_not_declared_is_left_out_and_refused(site: Path) -> None:
    only = "log_sum_exp or ranks_heads or test_strided or not_declared"
    found = found_by(site, "undeclared", only)
    outcomes = {name.partition("[")[0]: own["outcome"] for name, own in found.items()}
    assert outcomes == {
        "test_log_sum_exp": "undeclared",
        "test_log_sum_exp_of_nothing": "undeclared",
        "test_a_ranks_heads": "undeclared",
        "test_strided_pages": "undeclared",
        "test_what_is_not_declared_is_refused": "passed",
    }


def test_the_core_cannot_be_refused(site: Path) -> None:
    found = found_by(site, "few", "test_sinks or test_head_counts")
    failed = found.pop("test_sinks")
    assert failed["outcome"] == "failed"
    assert failed["text"] == "It has to serve this, and refused it: [q-heads] Too many heads. Use 16."
    outcomes = {int(name.partition("[")[2][:-1]): own["outcome"] for name, own in found.items()}
    assert outcomes == {
        **dict.fromkeys((1, 2, 3, 4, 8, 16), "passed"),
        **dict.fromkeys((24, 32, 48, 64, 96, 128), "refused"),
    }


def test_a_process_that_dies_fails_one_check_and_the_others_go_on(site: Path) -> None:
    found = found_by(site, "dies", "test_sinks or test_info or test_topk")
    failed = found.pop("test_sinks")
    assert (failed["outcome"], failed["level"], failed["reports"][0]) == ("failed", "L3", "atlas#341")
    assert failed["text"].startswith("The process died of it, as by a fault in a kernel library;")
    assert {own["outcome"] for own in found.values()} == {"passed", "core"}


def test_processes_are_lost_only_so_often(site: Path) -> None:
    found = found_by(site, "dies", "test_every_kind_in_every_phase")
    texts = [own["text"] for own in found.values() if own["outcome"] == "failed"]
    assert len(texts) == len(found) == 12
    assert sum(text.startswith("The process died of it") for text in texts) == 6
    assert texts.count("It was not run: the process of the checks was lost 6 times.") == 6


def test_a_hang_fails_one_check_and_the_others_go_on(site: Path) -> None:
    done = dsv4_check(site, "hangs", "--only", "test_sinks or test_description", "--deadline", "5")
    assert done.returncode == 1
    assert "failed: It hangs: it had not ended after 5 s. Where it was is printed above." in done.stdout
    assert done.stdout.endswith("hangs does not conform: 1 check failed.\n")
    assert "in dsv4_forward_mqa" in done.stderr


def test_no_check_of_that_name() -> None:
    with pytest.raises(ConfigError, match="No check is named like 'zzz'"):
        run_suite("reference", only="zzz")


def pytest_run(folder: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_star_import(tmp_path: Path) -> None:
    (tmp_path / "test_conformance.py").write_text("from dsv4core.testing.suite import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ndsv4_backend = reference\n")
    code, out = pytest_run(tmp_path, "-k", "test_info or test_description", "--strict-markers")
    assert code == 0, out
    assert "2 passed" in out


def test_pyargs_without_a_name(tmp_path: Path) -> None:
    code, out = pytest_run(tmp_path, "--pyargs", "dsv4core.testing.suite", "-k", "test_info")
    assert code == 1
    assert (
        "No backend is named; run pytest with --dsv4-backend NAME, or write dsv4_backend = NAME into" in out
    )


def test_pyargs_with_an_override_that_does_not_fit(tmp_path: Path) -> None:
    words = ("--dsv4-backend", "reference", "--dsv4-override", "backend.zzz=1")
    code, out = pytest_run(tmp_path, "--pyargs", "dsv4core.testing.suite", "-k", "test_info", *words)
    assert code == 1
    assert "'backend.zzz' is not an option of" in out


def test_every_check_is_marked_and_described() -> None:
    names: list[str] = []
    for name, check in checks().items():
        marks = [mark for mark in check.pytestmark if mark.name == "dsv4"]
        assert len(marks) == 1, name
        assert marks[0].kwargs["level"] in LEVELS
        assert check.__doc__, name
        names.append(name)
    assert not set(names) & {f"test_{module}" for module in MODULES}, "a module's name hides the check"
