from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4core import __version__
from dsv4core.api import BackendUnavailable
from dsv4core.cli.main import main
from dsv4core.config import DSV4Config
from dsv4core.testing.fakes import install_backend


class Run:
    """Stands for `dsv4core.cli.run`."""

    def __init__(self) -> None:
        self.configs: list[DSV4Config] = []
        self.result: int | BaseException = 0

    def run(self, config: DSV4Config) -> int:
        self.configs.append(config)
        logging.getLogger("dsv4core.framework.selection").info("acme was chosen.")
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run()
    monkeypatch.setitem(sys.modules, "dsv4core.cli.run", SimpleNamespace(run=run.run))
    return run


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dsv4: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("dsv4: ").rstrip("\n")


def test_run_gets_the_configuration(run: Run) -> None:
    run.result = 1
    assert main(["run", "decode=3", "--json", "verify=true"]) == 1
    assert run.configs == [DSV4Config(decode=3, json=True, verify=True)]


TEXTS = [
    (["--prompt", "a, b = 'c' ${d}"], "a, b = 'c' ${d}"),
    (["--prompt=x=y"], "x=y"),
    (["--prompt", "--help"], "--help"),
    (["--prompt", "@nobody"], "@nobody"),
    (["prompt=plain"], "plain"),
    ([], ""),
]


@pytest.mark.parametrize(("words", "text"), TEXTS)
def test_prompt(run: Run, words: list[str], text: str) -> None:
    assert main(["run", "decode=3", *words]) == 0
    assert (run.configs[0].prompt, run.configs[0].decode) == (text, 3)


def test_the_choice_is_logged(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run"])
    assert capsys.readouterr().err == "dsv4: acme was chosen.\n"


KEYS = (
    "backend, batch, bench, bench.*, checkpoint, chunk, decode, device, dtype, index_dtype, json, "
    "kv_cache_dtype, layers, model, plugins.*, prefill, prompt, request.*, scales, seed, verify, workload"
)
MISTAKES = [
    (["rum"], "'rum' is not a command; did you mean 'run'?"),
    (
        ["backend=x"],
        "'backend=x' is not a command; the commands are run, explain, plugins, bench, calibrate, new, check.",
    ),
    (
        ["run", "--jsn"],
        "dsv4 run takes no option '--jsn'; it takes --prompt TEXT, --json and --help.",
    ),
    (
        ["run", "--prompt"],
        "--prompt has no text; write --prompt TEXT, or prompt=@FILE to read it from a file.",
    ),
    (
        ["run", "--prompt="],
        "--prompt has no text; write --prompt TEXT, or prompt=@FILE to read it from a file.",
    ),
    (
        ["run", "--prompt", "a", "prompt=b"],
        "The prompt is given more than once; give it once, by --prompt TEXT or prompt=@FILE.",
    ),
    (["run", "prompt=@none"], "prompt=@none: none cannot be read: No such file or directory."),
    (["run", "decod=1"], "'decod' is not a key; did you mean 'decode'?"),
    (
        ["run", "-h=3"],
        "dsv4 run takes no option '-h=3'; it takes --prompt TEXT, --json and --help.",
    ),
    (["run", "zzz=1"], f"'zzz' is not a key; the keys are {KEYS}."),
    (["plugins", "decode=1"], "dsv4 plugins takes no 'decode=1'; it takes --json and --help only."),
    (["run", "--prompt", "a", "--prompt=b"], "--prompt is given more than once; give it once."),
    (["plugins", "--prompt", "a"], "dsv4 plugins takes no option '--prompt'; it takes --json and --help."),
    (["explain", "--quick"], "dsv4 explain takes no option '--quick'; it takes --json and --help."),
    (["check", "acme", "--only="], "--only has no text; write --only TEXT, a part of the names of checks."),
    (["check"], "dsv4 check takes one backend's name, and was given none; write dsv4 check NAME."),
    (["check", "a", "b"], "dsv4 check takes one backend's name, and was given a b; write dsv4 check NAME."),
    (
        ["check", "acme", "prefill=3"],
        "dsv4 check takes no 'prefill=3'; it takes backend.OPTION=…, device=…, dtype=…, --only TEXT, "
        "--quick, --deadline SECONDS and --json.",
    ),
    (
        ["check", "acme", "--deadline", "soon"],
        "--deadline soon is no number of seconds; write one, such as --deadline 600.",
    ),
    (
        ["check", "flashmla"],
        "[package-missing] Backend 'flashmla' is not installed. Run `pip install dsv4-plugin-flashmla`.",
    ),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES)
def test_mistakes(run: Run, capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert fails(capsys, *words) == text
    assert run.configs == []


def test_the_log_is_left_as_it_was(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("dsv4core")
    before = (logger.level, list(logger.handlers))
    main(["run"])
    main(["plugins"])
    assert (logger.level, logger.handlers) == before


def test_warnings_of_any_command_are_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSV4_STRIKT", "1")
    assert main(["plugins"]) == 0
    text = "dsv4: The environment variable DSV4_STRIKT changes nothing. Did you mean DSV4_STRICT?\n"
    assert capsys.readouterr().err == text


def test_errors_of_a_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.result = BackendUnavailable("acme cannot run this.")
    assert main(["run"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "dsv4: acme cannot run this."


def test_interrupt(run: Run) -> None:
    run.result = KeyboardInterrupt()
    assert main(["run"]) == 130


def test_own_bugs_keep_their_traceback(run: Run) -> None:
    run.result = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main(["run"])


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["run", "--help"], ["explain", "decode=1", "-h"]])
def test_help(run: Run, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    install_backend(run_folder := Path.cwd(), "acme")
    install_backend(run_folder, "broken", "raise OSError")
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("dsv4 run [key=value", "kv_cache_dtype auto", "checkpoint null", "backend.workspace_mib 64"):
        assert part in text
    for part in (
        "workload quick preset of prefill, decode and batch: long, quick",
        "request.seam layer depth at which the host uses the backend: layer, kernel",
        "dtype bfloat16 dtype of activations: bfloat16, float32",
        "DSV4_DISABLE=NAME",
        'eval "$(dsv4 -sc install=bash)"',
    ):
        assert part in text
    for part in ("computes nothing", "[broken] Backend 'broken' of fake-broken", "plugins.disable []"):
        assert part in text
    assert run.configs == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dsv4core {__version__}\n"


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    # The reader leaves before anything is written: head -0 would race with it.
    program = (
        "import os, sys; from dsv4core.cli.main import main; reader, writer = os.pipe(); os.close(reader); "
        "os.dup2(writer, 1); sys.exit(main(['plugins', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")
