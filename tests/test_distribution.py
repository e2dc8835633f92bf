"""What is built and installed: the wheel made from the sdist, and a plugin beside it in a clean venv."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from dsv4core import __version__
from dsv4core.testing.fakes import FAKE_BACKEND

ROOT = Path(__file__).parent.parent
NOT_TO_SELECT = ("torch", "safetensors", "numpy")  # what computing needs, and selecting must not
PLUGIN = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fake-plugin-acme"
version = "3.1"
dependencies = ["dsv4core>=0.1,<0.2"]

[project.entry-points."dsv4core.backends"]
acme = "fake_plugin_acme.plugin"
"""


def build(kind: str, source: Path, out: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "build",
        f"--{kind}",
        "--no-isolation",
        "--outdir",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core's wheel, made from its sdist as an index would have it."""
    folder = tmp_path_factory.mktemp("core")
    with tarfile.open(build("sdist", ROOT, folder / "sdist")) as tar:
        # Python 3.10.11 and 3.11.3 are the last without filters; the archive is our own.
        tar.extractall(folder / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return build("wheel", next((folder / "source").iterdir()), folder / "wheel")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a small backend."""
    folder = tmp_path_factory.mktemp("plugin")
    package = folder / "source" / "fake_plugin_acme"
    package.mkdir(parents=True)
    (folder / "source" / "pyproject.toml").write_text(PLUGIN)
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(FAKE_BACKEND)
    return build("wheel", folder / "source", folder / "wheel")


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(file for file in archive.namelist() if file.endswith(name))).decode()


def test_the_wheel_is_complete(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dsv4core").rglob("*.py")}
    configs = {f"dsv4core/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    template = {str(path.relative_to(ROOT)) for path in (ROOT / "dsv4core" / "template").rglob("*.*")}
    template = {name for name in template if (ROOT / name).is_file() and "__pycache__" not in name}
    assert "dsv4core/template/.github/workflows/test.yml" in template
    assert modules | configs | template | {"dsv4core/py.typed"} <= names
    assert len(configs) == 11
    assert not any(name.startswith(("tests", "benchmarks", "conf/")) for name in names)
    assert "[pytest11]\ndsv4core = dsv4core.testing.pytest_plugin" in read(wheel, "entry_points.txt")
    assert "[dsv4core.backends]\nreference = dsv4core.backends.reference" in read(wheel, "entry_points.txt")


PLUGINS = sorted((ROOT / "plugins").glob("*/pyproject.toml"))


@pytest.mark.parametrize("project", PLUGINS, ids=lambda path: path.parent.name)
def test_a_plugin_asks_for_this_core(project: Path) -> None:
    asked = re.search(r'"dsv4core(?:\[\w+\])?(>=[^"]+)"', project.read_text())
    assert asked is not None
    assert SpecifierSet(asked[1]).contains(__version__, prereleases=True)


class Venv:
    """A clean virtual environment, used from a folder that has nothing to do with the checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "venv"
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DSV4"))
        }
        done = subprocess.run(
            [str(self.folder / "bin" / program), *arguments],
            env=environment,
            cwd=self.elsewhere,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def venv(wheel: Path, plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    venv = Venv(tmp_path_factory.mktemp("installed"))
    required = message_from_string(read(wheel, "METADATA")).get_all("Requires-Dist", [])
    light = [
        text for text in required if "extra ==" not in text and re.split(r"\W", text)[0] not in NOT_TO_SELECT
    ]
    venv.run("pip", "install", "--quiet", *light)
    venv.run("pip", "install", "--quiet", "--no-deps", str(wheel), str(plugin))
    return venv


def explain(venv: Venv, *words: str) -> dict[str, object]:
    report: dict[str, object] = json.loads(venv.run("dsv4", "explain", "device=cpu", "--json", *words))
    return report


@pytest.mark.network
def test_it_is_the_installed_package_and_without_torch(venv: Venv) -> None:
    program = "import dsv4core, importlib.util as u; print(dsv4core.__file__, u.find_spec('torch'))"
    file, torch = venv.run("python", "-c", program).split()
    assert file.startswith(str(venv.folder))
    assert torch == "None"


@pytest.mark.network
def test_an_installed_plugin_is_listed(venv: Venv) -> None:
    rows = {row["name"]: row for row in json.loads(venv.run("dsv4", "plugins", "--json"))}
    assert rows["acme"] == {
        "name": "acme",
        "status": "ok",
        "dist": "fake-plugin-acme",
        "version": "3.1",
        "summary": "computes nothing",
        "fix": None,
    }
    assert (rows["reference"]["status"], rows["reference"]["version"]) == ("ok", __version__)


@pytest.mark.network
def test_an_installed_plugin_can_be_asked_for(venv: Venv) -> None:
    report = explain(venv, "backend=acme", "backend.workspace_mib=3", "model=v4_flash", "workload=long")
    assert report["chosen"] == "acme"
    assert report["decisions"] == [{"backend": "acme", "verdict": "chosen", "reasons": []}]
    assert report["config"]["backend.workspace_mib"] == {"value": 3, "source": "set"}  # type: ignore[index]


@pytest.mark.network
def test_installing_a_plugin_changes_nothing(venv: Venv) -> None:
    assert explain(venv)["chosen"] == "reference"


@pytest.mark.network
def test_a_plugin_can_be_uninstalled(venv: Venv, plugin: Path) -> None:
    venv.run("pip", "uninstall", "--quiet", "--yes", "fake-plugin-acme")
    rows = json.loads(venv.run("dsv4", "plugins", "--json"))
    assert "acme" not in [row["name"] for row in rows]
    venv.run("dsv4", "explain", "backend=acme", code=2)
    venv.run("pip", "install", "--quiet", "--no-deps", str(plugin))
    assert explain(venv, "backend=acme")["chosen"] == "acme"
