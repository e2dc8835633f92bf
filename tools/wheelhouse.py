"""Collects wheels for a host without a network: dsv4core, plugins, and what they need besides torch.

python tools/wheelhouse.py --python 3.12 --out wheelhouse [plugins/engine_vllm …] [matplotlib …]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
BY_SOURCE = "antlr4-python3-runtime==4.9.3"
"""Hydra 1.3's parser, of which there is no wheel."""
LEFT_OUT = frozenset({"torch", "triton"})
"""A GPU host has its own builds."""
MACHINES = ("x86_64", "aarch64")


class Mistake(Exception):
    """What was asked for cannot be collected."""


@dataclass(frozen=True)
class Host:
    """The machine that gets the wheels.

    Attributes:
        python: Its Python, such as `3.12`.
        machine: Its processor, as `uname -m` has it.
    """

    python: str
    machine: str

    @property
    def words(self) -> list[str]:
        """How pip is told of it."""
        names = [f"{name}_{self.machine}" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
        platforms = [word for name in (*names, "any") for word in ("--platform", name)]
        return ["--python-version", self.python, *platforms, "--only-binary", ":all:"]

    def applies(self, requirement: Requirement, extra: str) -> bool:
        """Whether a requirement is one there. pip decides by the Python that it runs in."""
        environment = {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "platform_machine": self.machine,
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
            "extra": extra,
        }
        return requirement.marker is None or requirement.marker.evaluate(environment)


def collect(host: Host, out: Path, words: Sequence[str]) -> None:
    """Build and download.

    Args:
        host: For which machine.
        out: Where the wheels go.
        words: Folders to build, and packages to download with what they need.

    Raises:
        Mistake: A word is neither, there are wheels already, or pip fails.
    """
    folders = [word for word in words if _is_folder(word)]
    wanted = {_package(word) for word in words if word not in folders}
    if list(out.glob("*.whl")):
        raise Mistake(
            f"{out} holds wheels already, and a host installs all; empty it, or name another folder."
        )
    with TemporaryDirectory() as place:
        built, found = Path(place) / "built", Path(place) / "found"
        _pip("wheel", "--no-deps", "--wheel-dir", str(built), BY_SOURCE, str(ROOT), *folders)
        own = _distributions(built)
        provided = LEFT_OUT | {canonicalize_name(wheel.name) for wheel in own}
        more, wanted = wanted | _needed(host, own, wanted, provided), set()
        while not more <= wanted:  # until what was downloaded needs nothing more
            wanted |= more
            shutil.rmtree(found, ignore_errors=True)
            _pip("download", "--no-deps", *host.words, "--dest", str(found), *sorted(wanted))
            more = _needed(host, _distributions(found), wanted, provided)
        out.mkdir(parents=True, exist_ok=True)
        for wheel in (*built.iterdir(), *found.iterdir()):
            shutil.move(wheel, out)


def _is_folder(word: str) -> bool:
    """Whether a word names a folder to build, not a package."""
    is_project = (Path(word) / "pyproject.toml").is_file()
    if "/" in word and not is_project:
        raise Mistake(f"{word} is no folder with a pyproject.toml; name one, or a package of the index.")
    return is_project


def _package(word: str) -> str:
    try:
        return str(Requirement(word))
    except InvalidRequirement:
        raise Mistake(f"{word!r} is no package; write NAME, or NAME==VERSION.") from None


def _distributions(folder: Path) -> list[Distribution]:
    """What the wheels in a folder hold."""
    return [own for wheel in sorted(folder.glob("*.whl")) for own in distributions(path=[str(wheel)])]


def _needed(
    host: Host, wheels: Iterable[Distribution], wanted: Iterable[str], provided: Container[str]
) -> set[str]:
    """What wheels require on the host, besides what is provided."""
    extras = {canonicalize_name(own.name): own.extras for own in map(Requirement, wanted)}
    extras["dsv4core"] = {"check"}  # `dsv4 check` needs pytest
    return {
        f"{own.name}{_extras(own)}{own.specifier}"
        for wheel in wheels
        for own in map(Requirement, wheel.requires or ())
        if canonicalize_name(own.name) not in provided
        and any(host.applies(own, extra) for extra in ("", *extras.get(canonicalize_name(wheel.name), ())))
    }


def _extras(own: Requirement) -> str:
    return f"[{','.join(sorted(own.extras))}]" if own.extras else ""


def _pip(*words: str) -> None:
    try:
        subprocess.run([sys.executable, "-m", "pip", *words, "--quiet"], check=True)
    except subprocess.CalledProcessError as error:
        raise Mistake(f"`pip {words[0]}` failed; it says above what it could not get.") from error


def main(words: Sequence[str]) -> None:
    """Collect, and say how large it is.

    Raises:
        Mistake: A word fits nothing, or pip fails.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="the host's, such as 3.12")
    parser.add_argument("--machine", choices=MACHINES, default=MACHINES[0], help="what `uname -m` says there")
    parser.add_argument("--out", type=Path, default=Path("wheelhouse"))
    parser.add_argument("more", nargs="*", help="folders of plugins, and packages such as matplotlib==3.10.0")
    arguments = parser.parse_args(words)
    if not re.fullmatch(r"3\.[1-9]\d", arguments.python):
        raise Mistake(f"{arguments.python!r} is no Python from 3.10 on; write --python 3.12 or the like.")
    collect(Host(arguments.python, arguments.machine), arguments.out, arguments.more)
    wheels = list(arguments.out.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(f"{arguments.out}: {len(wheels)} wheels, {size:.0f} MB")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Mistake as error:
        sys.exit(str(error))
