"""L1: the backend's calls into its kernel library fit the library, as recorded and as installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dsv4core.testing import signatures
from dsv4core.testing.signatures import Recorded
from dsv4core.testing.subject import Elsewhere, Subject
from dsv4core.testing.suite.marks import check


@check("L1", core=True, reports=("vllm#48054", "vllm#58069"))
def test_calls_fit_the_recorded_signatures(dsv4: Subject) -> None:
    """Every call of a recorded function binds, and every recorded function is called."""
    folder, recorded = _recorded(dsv4)
    needs = [need.module for need in dsv4.info.requirements]
    missing = [name for name in needs if not any(own.target.startswith(f"{name}.") for own in recorded)]
    assert not missing, (
        f"It needs {', '.join(missing)}, and {signatures.FILE} records no function of theirs; write it with "
        "`python -m dsv4core.testing.signatures`."
    )
    for own in recorded:
        calls = signatures.calls(folder, own.target)
        assert calls, f"{own.target} is recorded, and nothing calls it by its name."
        problems = [text for call in calls if (text := call.problem(own.parsed))]
        assert not problems, f"{own.target}{own.signature} of {own.distribution}: {'; '.join(problems)}."


@check("L1", reports=("vllm#48054", "vllm-plugin-FL#125"))
def test_calls_fit_the_installed_library(dsv4: Subject) -> None:
    """The same for what is installed here."""
    folder, recorded = _recorded(dsv4)
    absent = sorted({module for own in recorded if find_spec(module := own.target.partition(".")[0]) is None})
    if absent:
        raise Elsewhere(f"{', '.join(absent)} is not installed here.")
    for own in recorded:
        signature = signatures.installed(own.target)
        problems = [
            text for call in signatures.calls(folder, own.target) if (text := call.problem(signature))
        ]
        assert not problems, f"{own.target}{signature} is installed, and: {'; '.join(problems)}."


def _recorded(subject: Subject) -> tuple[Path, list[Recorded]]:
    folder = signatures.package_folder(subject.backend.record.package)
    return (Path(), []) if folder is None else (folder, signatures.read(folder))
