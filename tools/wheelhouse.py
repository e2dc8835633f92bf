"""Collects wheels for a host without a network: dsv4core, plugins, and what they need besides torch.

python tools/wheelhouse.py --python 3.12 --out wheelhouse [plugins/engine_vllm …] [PACKAGE==VERSION …]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BY_SOURCE = ("antlr4-python3-runtime==4.9.3",)
"""Hydra 1.3's parser, of which there is no wheel."""
NEEDED = (
    *("hydra-core==1.3.2", "omegaconf==2.3.0", "pluggy", "PyYAML", "packaging", "safetensors", "numpy"),
    *("rich", "markdown-it-py", "mdurl", "pygments", "typing_extensions", "pytest", "iniconfig"),
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "any")


def collect(python: str, out: Path, more: list[str]) -> None:
    """Build and download.

    Args:
        python: The host's Python, such as `3.12`.
        out: Where the wheels go.
        more: Folders to build, and packages to download without what they need.
    """
    folders = [str(ROOT), *(name for name in more if Path(name).is_dir())]
    packages = [*NEEDED, *(name for name in more if not Path(name).is_dir())]
    _pip("wheel", "--no-deps", "--wheel-dir", str(out), *BY_SOURCE, *folders)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = ["--python-version", python, *platforms, "--only-binary", ":all:"]
    _pip("download", "--no-deps", *target, "--dest", str(out), *packages)


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words, "--quiet"], check=True)


def main() -> None:
    """Collect, and say how large it is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True)
    parser.add_argument("--out", type=Path, default=Path("wheelhouse"))
    parser.add_argument("more", nargs="*")
    arguments = parser.parse_args()
    collect(arguments.python, arguments.out, arguments.more)
    wheels = list(arguments.out.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(f"{arguments.out}: {len(wheels)} wheels, {size:.0f} MB")


if __name__ == "__main__":
    main()
