"""What a host without a network is brought: pip's command lines, with an index of a few packages for pip."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("wheelhouse", ROOT / "tools" / "wheelhouse.py")
assert spec is not None
assert spec.loader is not None
wheelhouse = importlib.util.module_from_spec(spec)
sys.modules["wheelhouse"] = wheelhouse  # dataclasses look for it
spec.loader.exec_module(wheelhouse)

INDEX = {
    "dsv4core": [
        "torch>=2.9",
        "hydra-core>=1.3.2",
        "numpy",
        "pytest>=8; extra == 'check'",
        "x; extra == 'docs'",
    ],
    "antlr4-python3-runtime": [],
    "dsv4-vllm": ["dsv4core>=0.1", "wrapt>=1.16"],
    "hydra-core": ["antlr4-python3-runtime==4.9.*"],
    "numpy": [],
    "pytest": [
        "exceptiongroup>=1; python_version < '3.11'",
        "colorama; sys_platform == 'win32'",
        "pluggy[fast]",
    ],
    "exceptiongroup": ["typing-extensions; python_version < '3.13'"],
    "typing-extensions": [],
    "pluggy": ["quick; extra == 'fast' and platform_machine == 'aarch64'"],
    "quick": ["triton"],
    "wrapt": [],
    "matplotlib": ["numpy<2", "pillow"],
    "pillow": [],
}
FOLDERS = {str(ROOT): "dsv4core", "plugins/engine_vllm": "dsv4-vllm"}
Lines = list[list[str]]


def option(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """The command lines that pip gets; it makes wheels of the index above."""
    lines: Lines = []

    def run(command: list[str], check: bool) -> None:
        line = command[3:-1]
        assert (command[:3], command[-1], check) == ([sys.executable, "-m", "pip"], "--quiet", True)
        lines.append(line)
        folder = Path(option(line, "--wheel-dir" if line[0] == "wheel" else "--dest"))
        folder.mkdir(exist_ok=True)
        wanted = line[line.index(str(folder)) + 1 :]
        for name in {re.split(r"[\[<>=]", FOLDERS.get(word, word))[0] for word in wanted}:
            if name not in INDEX:
                raise subprocess.CalledProcessError(1, command)
            with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-1-py3-none-any.whl", "w") as wheel:
                requires = "".join(f"Requires-Dist: {own}\n" for own in INDEX[name])
                text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{requires}"
                wheel.writestr(f"{name.replace('-', '_')}-1.dist-info/METADATA", text)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(ROOT)
    yield lines
    assert not any(word.startswith(("torch", "triton")) for line in lines for word in line)


def names(out: Path) -> set[str]:
    return {wheel.name.partition("-")[0] for wheel in out.iterdir()}


CORE = {"dsv4core", "antlr4_python3_runtime", "hydra_core", "numpy", "pytest", "pluggy"}
HOSTS = [
    (["--python", "3.12"], CORE),
    (["--python", "3.10"], CORE | {"exceptiongroup", "typing_extensions"}),
    (["--python", "3.12", "--machine", "aarch64"], CORE | {"quick"}),
    (["--python", "3.12", "plugins/engine_vllm"], CORE | {"dsv4_vllm", "wrapt"}),
    (["--python", "3.12", "matplotlib==3.10"], CORE | {"matplotlib", "pillow"}),
]


@pytest.mark.parametrize(("words", "wheels"), HOSTS)
def test_what_is_collected(
    pip: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], wheels: set[str]
) -> None:
    out = tmp_path / "out"
    wheelhouse.main([*words, "--out", str(out)])
    assert names(out) == wheels
    assert capsys.readouterr().out == f"{out}: {len(wheels)} wheels, 0 MB\n"


def test_command_lines(pip: Lines, tmp_path: Path) -> None:
    words = ["--python", "3.12", "--machine", "aarch64", "plugins/engine_vllm", "matplotlib==3.10"]
    wheelhouse.main([*words, "--out", str(tmp_path)])
    build = ["wheel", "--no-deps", "--wheel-dir"]
    assert pip[0][:3] == build
    assert pip[0][4:] == ["antlr4-python3-runtime==4.9.3", str(ROOT), "plugins/engine_vllm"]
    last = pip[-1]
    assert last[:4] == ["download", "--no-deps", "--python-version", "3.12"]
    assert [last[number + 1] for number, word in enumerate(last) if word == "--platform"] == [
        "manylinux_2_28_aarch64",
        "manylinux_2_17_aarch64",
        "manylinux2014_aarch64",
        "any",
    ]
    assert option(last, "--only-binary") == ":all:"
    wanted = ["hydra-core>=1.3.2", "matplotlib==3.10", "numpy", "numpy<2", "pillow"]
    wanted += ["pluggy[fast]", "pytest>=8", "quick", "wrapt>=1.16"]
    assert last[last.index("--dest") + 2 :] == wanted, "all of them at once, so that versions fit together"


MISTAKES = [
    (
        ["plugins/engin_vllm"],
        "plugins/engin_vllm is no folder with a pyproject.toml; name one, or a package of the index.",
    ),
    (["docs/"], "docs/ is no folder with a pyproject.toml; name one, or a package of the index."),
    (["a b"], "'a b' is no package; write NAME, or NAME==VERSION."),
    (["absent"], "`pip download` failed; it says above what it could not get."),
    (["--python", "python3"], "'python3' is no Python from 3.10 on; write --python 3.12 or the like."),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES)
def test_mistakes(pip: Lines, tmp_path: Path, words: list[str], text: str) -> None:
    with pytest.raises(wheelhouse.Mistake) as mistake:
        wheelhouse.main(["--python", "3.12", "--out", str(tmp_path), *words])
    assert str(mistake.value) == text


def test_a_folder_that_holds_wheels(pip: Lines, tmp_path: Path) -> None:
    (tmp_path / "old-1-py3-none-any.whl").touch()
    with pytest.raises(wheelhouse.Mistake) as mistake:
        wheelhouse.main(["--python", "3.12", "--out", str(tmp_path)])
    assert str(mistake.value) == (
        f"{tmp_path} holds wheels already, and a host installs all; empty it, or name another folder."
    )
    assert not pip
