"""A backend as `dsv4 new` writes it, and the example, installed as wheels, are listed and conform."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4core.cli.new import write_backend

EXAMPLE = Path(__file__).parents[2] / "examples" / "acme_backend"


def dsv4(site: Path, *words: str) -> subprocess.Popen[str]:
    # One thread each: both packages are checked at a time.
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from dsv4core.cli.main import main; exit(main())", *words, "--json"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages, from wheels."""
    folder = tmp_path_factory.mktemp("packages")
    write_backend("wave_npu", folder / "dsv4-plugin-wave-npu")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    sources = [str(folder / "dsv4-plugin-wave-npu"), str(EXAMPLE)]
    subprocess.run([*pip, "--target", str(folder / "site"), *sources], check=True)
    return folder / "site"


def test_they_are_listed(site: Path) -> None:
    listed = {row["name"]: row for row in json.loads(dsv4(site, "plugins").communicate()[0])}
    for name, distribution in (("wave_npu", "dsv4-plugin-wave-npu"), ("acme", "dsv4-plugin-acme")):
        assert (listed[name]["status"], listed[name]["dist"]) == ("ok", distribution)


def test_they_conform(site: Path) -> None:
    running = {name: dsv4(site, "check", name, "--quick") for name in ("wave_npu", "acme")}
    for name, process in running.items():
        found = json.loads(process.communicate()[0])
        failed = [checked for checked in found["checks"] if checked["outcome"] == "failed"]
        assert not failed, name
        assert process.returncode == 0
        assert found["ok"]
        assert sum(levels["passed"] + levels["core"] for levels in found["levels"].values()) > 280
