"""Everything that a report from an AMD machine needs, by one command, in one file.

    python -m dsv4_plugin_rocm_aiter.report [FOLDER]

runs the whole suite and verified runs in both cache formats, and packs what they said with versions and
variables into `FOLDER/dsv4-rocm-aiter-<chip>.tar.gz`. Weights are random and not in it; paths may be, in
variables and tracebacks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dsv4_plugin_rocm_aiter.library import DISTRIBUTION
from dsv4core.api import ConfigError
from dsv4core.framework.kernels import TRITON
from dsv4core.framework.platform import guess_machine

PACKAGES = (DISTRIBUTION, "aiter", "flydsl", TRITON.distribution, *TRITON.alternatives, "torch", "numpy")
VARIABLES = (
    "AITER_",
    "AMDGCN_",
    "GPU_ARCHS",
    "HIP_",
    "HSA_",
    "PYTORCH_",
    "ROCM_",
    "ROCR_",
    "TRITON_",
    "DSV4_",
)
"""How the names of variables begin that change what is computed: users' reports went by them."""
RUN = (
    *("run", "backend=rocm_aiter", "model=v4_flash", "layers=[0,2,3]"),
    *("prefill=4096", "chunk=2048", "verify=true", "--json"),
)
"""A layer of each kind, chunks as large as OPUS asks for, contexts in which the indexer has to choose."""
COMMANDS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "explain.json": ("explain", "backend=rocm_aiter", "model=v4_flash", "request.probe=host", "--json"),
        "check.json": ("check", "rocm_aiter", "--json"),
        "check_by_the_core.json": (
            *("check", "rocm_aiter", "backend.core=[decode,prefill,o_proj]"),
            "--json",
        ),
        "run_fp8_ds_mla.json": (*RUN, "kv_cache_dtype=fp8_ds_mla"),
        "run_bf16.json": (*RUN, "kv_cache_dtype=bf16"),
    }
)
"""Arguments of `dsv4` by the file that their output goes to; all are run, whatever the others say."""
DSV4 = "import sys; from dsv4core.cli.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Step:
    """A command that was run.

    Attributes:
        name: The file of its output.
        command: As a user would write it.
        code: Its exit code.
        output: What it printed.
        errors: What it printed on stderr.
    """

    name: str
    command: str
    code: int
    output: str
    errors: str

    @property
    def verdict(self) -> str:
        """In a word or two: `ok` is said only where everything has run."""
        if self.code:
            return f"exit code {self.code}"
        return "incomplete" if self.told().get("complete") is False else "ok"

    def told(self) -> dict[str, Any]:
        """What it printed, as data; empty where that is none."""
        try:
            told = json.loads(self.output)
        except ValueError:
            return {}
        return told if isinstance(told, dict) else {}


def steps() -> Iterator[Step]:
    """Run all commands, each in a process of its own: one that a kernel kills ends no other."""
    for name, words in COMMANDS.items():
        command = f"dsv4 {' '.join(words)}"
        print(command, file=sys.stderr)
        done = subprocess.run([sys.executable, "-c", DSV4, *words], capture_output=True, text=True)
        yield Step(name, command, done.returncode, done.stdout, done.stderr)


def surroundings() -> dict[str, object]:
    """The machine's chip, versions of packages, and variables that change what is computed."""
    machine = guess_machine()
    versions = {own.metadata["Name"]: own.version for own in distributions()}
    return {
        "platform": machine.platform,
        "arch": machine.arch,
        "python": sys.version.split()[0],
        "packages": {
            name: version
            for name, version in sorted(versions.items())
            if name in PACKAGES or name.startswith("dsv4")
        },
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
        },
    }


def pack(folder: Path, around: Mapping[str, object], done: Sequence[Step]) -> Path:
    """Write the file; its table of contents is `report.json`."""
    kept = [
        {name: value for name, value in asdict(step).items() if name in ("name", "command", "code")}
        for step in done
    ]
    files = {"report.json": json.dumps({**around, "steps": kept}, indent=1)}
    for step in done:
        files |= {step.name: step.output, f"{step.name}.stderr": step.errors}
    path = folder / f"dsv4-rocm-aiter-{around['arch'] or 'cpu'}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, BytesIO(data))
    return path


def why_not(done: Sequence[Step]) -> str:
    """Why the backend cannot run here, as `dsv4 explain` says it; empty where it can."""
    explained = next((step for step in done if step.command.startswith("dsv4 explain") and step.code), None)
    if explained is None:
        return ""
    reasons = [
        f"{reason['text']} {reason['fix'] or ''}".rstrip()
        for decision in explained.told().get("decisions", ())
        if decision["backend"] == "rocm_aiter"
        for reason in decision["reasons"]
    ]
    return f"backend=rocm_aiter cannot run here. {' '.join(reasons) or explained.errors.strip()}"


def main(arguments: Sequence[str]) -> int:
    """Run, pack, and say where the file is; the result is the exit code, 1 where not everything has run.

    Raises:
        ConfigError: The folder is none.
    """
    folder = Path(arguments[0] if arguments else ".")
    if len(arguments) > 1 or not folder.is_dir():
        raise ConfigError(f"{' '.join(arguments)} is no folder; write one, or nothing for this one.")
    done = list(steps())
    path = pack(folder, surroundings(), done)
    if reason := why_not(done):
        print(reason)
    for step in done:
        print(f"{step.verdict}: {step.command}")
    print(f"Attach {path} to a report, whatever it says: nobody has seen these kernels run.")
    return int(any(step.verdict != "ok" for step in done))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(str(error))
