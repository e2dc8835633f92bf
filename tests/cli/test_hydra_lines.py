"""The oldest and the newest Hydra that are allowed: the same tests, and somebody else's application."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4core.framework.discovery import discover
from dsv4core.testing.fakes import install_backend

pytestmark = pytest.mark.network
HERE = Path(__file__).parent
LINES = {
    "1.3.2": ("hydra-core==1.3.2", "omegaconf==2.3.0"),
    "1.4.0rc3": ("hydra-core==1.4.0rc3", "omegaconf==2.4.1rc1"),
}
APPLICATION = """
import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from dsv4core.hydra import register_configs

register_configs(group="dsv4/backend")
defaults = ["_self_", {"dsv4": "dsv4_config"}, {"dsv4/backend": "auto"}]
ConfigStore.instance().store(name="app", node={"defaults": defaults, "lr": 1.0})
base = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


@hydra.main(config_path=None, config_name="app", **base)
def main(config):
    backend = OmegaConf.to_object(config.dsv4).backend
    print(f"{hydra.__version__} lr={config.lr} {type(backend).__name__} {vars(backend)}")


main()
"""


@pytest.fixture(scope="session", params=LINES)
def line(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """One line of Hydra, and the folder that it is installed in, beside what is installed already."""
    folder = tmp_path_factory.mktemp("hydra")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, *LINES[request.param]], check=True, capture_output=True)
    return request.param, folder


def python(line: tuple[str, Path], *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{line[1]}{os.pathsep}{cwd}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)


TESTS = ("test_compose.py", "test_explain_command.py", "test_completion.py::test_scripts_ask_for_candidates")


def test_composition_and_commands(line: tuple[str, Path], tmp_path: Path) -> None:
    version = python(line, "-c", "import hydra; print(hydra.__version__)", cwd=tmp_path).stdout
    assert version == f"{line[0]}\n"
    options = ["-W", "error::UserWarning", "-p", "no:cacheprovider", f"--rootdir={HERE.parent.parent}"]
    done = python(line, "-m", "pytest", *options, *(str(HERE / name) for name in TESTS), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def application(tmp_path: Path) -> Path:
    install_backend(tmp_path, "acme")
    install_backend(tmp_path, "broken", "raise OSError('lib')")
    (tmp_path / "app.py").write_text(APPLICATION)
    return tmp_path


INSTALLED = sorted(discover())
"""Beside those of a test: the core's, and the repository's plugins."""
NO_FILES = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout")


def test_an_application_of_somebody_else(line: tuple[str, Path], application: Path) -> None:
    words = ["app.py", "lr=2", "dsv4/backend=acme", "dsv4.backend.workspace_mib=3", *NO_FILES]
    done = python(line, *words, cwd=application)
    assert done.stdout == f"{line[0]} lr=2 Options {{'name': 'acme', 'workspace_mib': 3}}\n"
    assert done.stderr == (
        "[broken] Backend 'broken' of fake-broken 1.0 cannot be loaded: OSError: lib "
        f"({application / 'fake_broken.py'}, line 1). "
        "Repair or uninstall fake-broken; DSV4_STRICT=1 shows the traceback.\n"
    )


def test_it_sweeps(line: tuple[str, Path], application: Path) -> None:
    done = python(
        line, "app.py", "-m", "dsv4/backend=acme,reference", "hydra.sweep.dir=runs", cwd=application
    )
    assert [text.split("lr=")[1].split()[1] for text in done.stdout.splitlines() if "lr=" in text] == [
        "Options",
        "ReferenceOptions",
    ]


def test_its_help_lists_the_backends(line: tuple[str, Path], application: Path) -> None:
    done = python(line, "app.py", "--help", cwd=application)
    assert f"dsv4/backend: {', '.join(sorted(['acme', 'auto', *INSTALLED]))}\n" in done.stdout


def test_its_shell_completes_the_backends(
    line: tuple[str, Path], application: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", "python app.py dsv4/backend=")
    done = python(line, "app.py", "-sc", "query=bash", cwd=application)
    assert done.stdout.split() == [f"dsv4/backend={name}" for name in sorted(["acme", "auto", *INSTALLED])]


def test_it_may_leave_backends_out(line: tuple[str, Path], application: Path) -> None:
    file = application / "app.py"
    file.write_text(
        file.read_text().replace('"dsv4/backend")', f'"dsv4/backend", disable={["broken", *INSTALLED]})')
    )
    done = python(line, "app.py", *NO_FILES, cwd=application)
    assert "AutoOptions" in done.stdout
    assert done.stderr == ""
    done = python(line, "app.py", "--help", cwd=application)
    assert "dsv4/backend: acme, auto\n" in done.stdout


TYPO = ("dsv4/backend=acme", "dsv4.backend.workspace=3")


def test_its_mistakes_are_hydras_to_tell(line: tuple[str, Path], application: Path) -> None:
    done = python(line, "app.py", *TYPO, cwd=application)
    assert done.returncode == 1
    assert "Key 'workspace' not in 'Options'" in done.stderr
