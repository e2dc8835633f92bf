"""What a shell offers after `dsv4`, asked for as the shell asks, and once through bash itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4core.cli.main import main
from dsv4core.testing.fakes import altered, install_backend

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def backends(folder: Path) -> None:
    install_backend(folder, "acme")
    install_backend(folder, "broken", "raise OSError('lib')")


def offered(capsys: Capture, monkeypatch: pytest.MonkeyPatch, line: str, shell: str = "bash") -> list[str]:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", f"query={shell}"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.rstrip("\n").split("\n" if shell == "fish" else " ")


LINES = [
    ("dsv4 ", "--help --version bench calibrate check explain new plugins run"),
    ("dsv4 e", "explain"),
    ("dsv4   run backend=", "backend=acme backend=auto backend=broken"),
    ("dsv4 run backend=a", "backend=acme backend=auto"),
    ("dsv4 run model=", "model=tiny model=v4_flash model=v4_pro"),
    ("dsv4 run workload=l", "workload=long"),
    ("dsv4 run kv_cache_dtype=fp8", "kv_cache_dtype=fp8 kv_cache_dtype=fp8_ds_mla kv_cache_dtype=fp8_e4m3"),
    ("dsv4 run index_dtype=b", "index_dtype=bf16"),
    ("dsv4 run device=", "device=auto device=cpu device=cuda"),
    ("dsv4 run verify=", "verify=false verify=true"),
    ("dsv4 run prefill=", ""),
    ("dsv4 run zzz=", ""),
    ("dsv4 run backend=acme backend.", "backend.workspace_mib="),
    ("dsv4 run backend=broken backend.", ""),
    ("dsv4 run backend=absent backend.", ""),
    ("dsv4 run backend.", "backend.order="),
    ("dsv4 run --", "--help --json --prompt"),
    ("dsv4 explain --", "--help --json"),
    ("dsv4 run request.", ""),
    ("dsv4 explain request.pr", "request.private_output= request.probe="),
    ("dsv4 explain request.probe=", "request.probe=host request.probe=static"),
    ("dsv4 plugins ", "--help --json"),
    ("dsv4 check ", "--help acme broken"),
    ("dsv4 check a", "acme"),
    ("dsv4 check acme ", "--deadline --help --json --only --quick backend.workspace_mib= device= dtype="),
    ("dsv4 check acme device=", "device=auto device=cpu device=cuda"),
    ("dsv4 rum ", ""),
]


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_candidates(capsys: Capture, monkeypatch: pytest.MonkeyPatch, line: str, expected: str) -> None:
    assert " ".join(offered(capsys, monkeypatch, line)) == expected


def test_all_keys_of_run(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    words = offered(capsys, monkeypatch, "dsv4 run decode=3 ")
    assert {"backend=", "model=", "workload=", "kv_cache_dtype=", "plugins.disable=", "--prompt"} <= set(
        words
    )
    assert "backend.name=" not in words


def test_folders_of_checkpoints(capsys: Capture, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for name in ("flash", "flat", "other"):
        (folder / name).mkdir()
    (folder / "flag").write_text("")
    line = f"dsv4 run checkpoint={folder}/fla"
    expected = [f"checkpoint={folder}/flash/", f"checkpoint={folder}/flat/"]
    assert offered(capsys, monkeypatch, line, shell="fish") == expected


def test_it_is_quiet_about_the_environment(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_STRIKT", "1")
    assert offered(capsys, monkeypatch, "dsv4 run backend=ac") == ["backend=acme"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_ask_for_candidates(capsys: Capture, shell: str) -> None:
    assert main(["-sc", f"install={shell}"]) == 0
    assert "-sc query=" in capsys.readouterr().out


MISTAKES = [
    (["-sc"], "-sc  is not known; write -sc install=bash, zsh or fish."),
    (["-sc", "uninstall=bash"], "-sc uninstall=bash is not known; write -sc install=bash, zsh or fish."),
    (["-sc", "query"], "-sc query is not known; write -sc install=bash, zsh or fish."),
    (["--shell-completion", "install=ksh"], "-sc install=ksh is not known; the shells are bash, fish, zsh."),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES)
def test_mistakes(capsys: Capture, words: list[str], text: str) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"dsv4: {text}\n"


BASH = """
eval "$(dsv4 -sc install=bash)"
complete -p dsv4
COMP_LINE="dsv4 run backend=ac" COMP_WORDS=(dsv4 run backend=ac) COMP_CWORD=2
hydra_bash_completion
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="this machine has no bash")
def test_bash_itself(tmp_path: Path) -> None:
    install_backend(tmp_path, "acid", altered())
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
    }
    done = subprocess.run(["bash", "-c", BASH], env=environment, cwd=tmp_path, capture_output=True, text=True)
    rule, reply = done.stdout.splitlines()
    assert "hydra_bash_completion dsv4" in rule
    assert reply.split() == ["backend=acid", "backend=acme"]
