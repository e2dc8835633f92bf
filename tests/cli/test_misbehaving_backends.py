"""Backends that load, and then print, exit, hang or raise where nobody expects it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from terminal import Capture, error, explain

from dsv4core.api import PluginError
from dsv4core.cli.main import main
from dsv4core.framework import watchdog
from dsv4core.testing.fakes import FAKE_BACKEND, altered, install_backend

REASONS = "def dsv4_unsupported_reasons(request):\n    return []"


def test_what_plugins_print_is_no_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    loud = altered((REASONS, REASONS.replace("return", "print('asked'); return")))
    install_backend(folder, "good", "print('imported')\n" + loud)
    assert explain(capsys, "backend=good")["chosen"] == "good"
    assert main(["plugins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "good"
    monkeypatch.setenv("COMP_LINE", "dsv4 run backend=good backend.")
    sys.modules.pop("fake_good")
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out == "backend.workspace_mib=\n"


def test_a_probe_that_exits_is_a_reason(folder: Path, capsys: Capture) -> None:
    exits = REASONS.replace("return []", "raise SystemExit(3)")
    install_backend(folder, "bad", altered((REASONS, exits)))
    install_backend(folder, "good")
    assert explain(capsys, "backend.order.cpu=[bad,good]")["chosen"] == "good"
    report = explain(capsys, "backend=bad", code=2)
    assert report["decisions"][0]["reasons"][0]["text"].startswith("Its checks raised SystemExit: 3 (")


def test_a_hanging_import_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE", 0.1)
    install_backend(folder, "bad", "import time; time.sleep(0.4)\n" + FAKE_BACKEND)
    assert main(["plugins"]) == 0
    assert capsys.readouterr().err == (
        "dsv4: Importing backend 'bad' of fake-bad 1.0 has taken 0.1 s so far. If it hangs, interrupt it and "
        "start again with DSV4_DISABLE=bad.\n"
    )


INIT = '    return ("layer", layer.index, weights)'
RUN = ("run", "device=cpu", "backend=bad", "layers=[0]", "prefill=2", "decode=1", "batch=1")


def test_a_hook_that_exits_does_not_end_the_command_well(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "bad", altered((INIT, "    raise SystemExit(0)")))
    assert main(RUN) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "dsv4: [broken] Backend 'bad' of fake-bad 1.0 left the process from dsv4_init_layer_buffers, "
        "layer 0 (swa). Repair or uninstall fake-bad."
    )


@pytest.mark.parametrize("raised", [OSError, KeyError, RuntimeError])
def test_a_traceback_names_backend_and_layer(folder: Path, raised: type[Exception]) -> None:
    install_backend(folder, "bad", altered((INIT, f"    raise {raised.__name__}('libfoo.so: cannot open')")))
    with pytest.raises(raised) as caught:
        main(RUN)
    shown = "".join(traceback.format_exception(caught.value))
    if sys.version_info >= (3, 11):
        assert shown.endswith("\nin dsv4_init_layer_buffers of backend 'bad' (fake-bad 1.0), layer 0 (swa)\n")


PRINTS = "import os\nos.write(1, b'from C\\n')\nprint('from Python')\n"


@pytest.mark.parametrize(
    "words", [["plugins", "--json"], ["explain", "device=cpu", "backend=loud", "--json"]]
)
def test_nothing_but_the_result_reaches_stdout(folder: Path, words: list[str]) -> None:
    install_backend(folder, "loud", PRINTS + FAKE_BACKEND)
    program = "import sys; from dsv4core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)
    assert sorted(done.stderr.splitlines()) == ["from C", "from Python"]


def test_a_backend_that_writes_into_its_options(folder: Path, capsys: Capture) -> None:
    writes = REASONS.replace("(request)", "(request, options)").replace(
        "return", "options.workspace_mib = 1; return"
    )
    install_backend(folder, "bad", altered((REASONS, writes)))
    report = explain(capsys, "backend=bad")
    assert report["config"]["backend.workspace_mib"] == {"value": 64, "source": "default"}
    assert report["selection"]["options"] == {"workspace_mib": 1}


KINDS = """
from enum import Enum
from pathlib import Path


class Mode(Enum):
    FAST = 1


@dataclass
class Options(BackendOptions):
    mode: Mode = Mode.FAST
    cache: Path = Path("kernels")
"""


def test_options_of_kinds_that_json_does_not_know(folder: Path, capsys: Capture) -> None:
    plain = "@dataclass\nclass Options(BackendOptions):\n    workspace_mib: int = 64\n"
    install_backend(folder, "good", altered((plain, KINDS)))
    config = explain(capsys, "backend=good", "backend.cache=/var/kernels")["config"]
    assert config["backend.cache"] == {"value": "/var/kernels", "source": "set"}
    assert config["backend.mode"] == {"value": "Mode.FAST", "source": "default"}


def test_choices_that_are_numbers(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = "int = field(default=64, metadata={'help': 'MiB', 'choices': (64, 128)})"
    install_backend(
        folder, "good", altered(("int = 64", choices), ("import dataclass", "import dataclass, field"))
    )
    assert main(["--help"]) == 0
    assert "MiB: 64, 128" in capsys.readouterr().out
    monkeypatch.setenv("COMP_LINE", "dsv4 run backend=good backend.workspace_mib=")
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out == "backend.workspace_mib=128 backend.workspace_mib=64\n"


def test_a_prompt_is_never_disturbed(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    install_backend(folder, "bad", "raise OSError('lib')")
    monkeypatch.setenv("DSV4_STRICT", "1")
    monkeypatch.setenv("COMP_LINE", "dsv4 run backend=bad backend.")
    assert main(["-sc", "query=bash"]) == 0
    assert tuple(capsys.readouterr()) == ("\n", "")


LISTS = [["plugins"], ["plugins", "--json"], ["--help"], ["explain", "device=cpu", "backend=good", "-h"]]


@pytest.mark.parametrize("words", LISTS)
def test_strict_raises_in_every_list(folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    install_backend(folder, "bad", "raise SystemExit(0)")
    monkeypatch.setenv("DSV4_STRICT", "1")
    with pytest.raises(PluginError) as caught:
        main(words)
    assert isinstance(caught.value.__cause__, SystemExit)


def test_strict_ends_in_one_line_where_nothing_was_raised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    install_backend(folder, "bad", altered(("dsv4_o_proj", "dsv4_oproj")))
    monkeypatch.setenv("DSV4_STRICT", "1")
    for words in (["plugins"], ["explain", "device=cpu", "backend.order.cpu=[bad]"]):
        assert error(capsys, *words).startswith("[broken] Backend 'bad' of fake-bad 1.0 does not follow")


def test_long_paths_are_not_cut(folder: Path, capsys: Capture) -> None:
    path = "/" + "x" * 200
    install_backend(folder, "bad", f"raise OSError('{path}')")
    assert main(["plugins"]) == 0
    assert path in "".join(capsys.readouterr().out.split())


def test_escapes_do_not_reach_the_terminal(folder: Path, capsys: Capture) -> None:
    install_backend(folder, "bad", "raise OSError('\\x1b[31mred\\x07 \\x00')")
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
