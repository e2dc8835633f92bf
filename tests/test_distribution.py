"""What is built and installed: an sdist, and the wheel that is made from it."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


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


def test_a_wheel_made_from_the_sdist_is_complete(tmp_path):
    archive = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "source", filter="data")
    wheel = build("wheel", next((tmp_path / "source").iterdir()), tmp_path / "wheel")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dsv4core").rglob("*.py")}
    configs = {f"dsv4core/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert modules | configs | {"dsv4core/py.typed"} <= names
    assert len(configs) == 6
    assert not any(name.startswith(("tests", "benchmarks", "conf/")) for name in names)
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "[dsv4core.backends]\nreference = dsv4core.backends.reference" in text
