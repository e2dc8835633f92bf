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
    known = {own.target.partition(".")[0] for own in recorded}
    missing = [name for name in needs if name.partition(".")[0] not in known]
    assert not missing, (
        f"It needs {', '.join(missing)}, and {signatures.FILE} in its package records no function of theirs; "
        "write it with `python -m dsv4core.testing.signatures`."
    )
    for own in _functions(recorded):
        calls = signatures.calls(folder, own.target)
        assert calls, f"{own.target} is recorded, and nothing calls it by its name."
        problems = [text for call in calls if (text := call.problem(own.parsed))]
        assert not problems, f"{own.target}{own.signature} of {own.distribution}: {'; '.join(problems)}."


@check("L1", reports=("vllm#48054", "vllm-plugin-FL#125"))
def test_calls_fit_the_installed_library(dsv4: Subject) -> None:
    """The same for what is installed here."""
    folder, recorded = _recorded(dsv4)
    functions = _functions(recorded)
    modules = {own.target.partition(".")[0] for own in functions}
    absent = sorted(module for module in modules if find_spec(module) is None)
    if absent:
        raise Elsewhere(f"{', '.join(absent)} is not installed here.")
    for own in functions:
        signature, calls = signatures.installed(own.target), signatures.calls(folder, own.target)
        problems = [text for call in calls if (text := call.problem(signature))]
        assert not problems, f"{own.target}{signature} is installed, and: {'; '.join(problems)}."


def _functions(recorded: list[Recorded]) -> list[Recorded]:
    """Those whose calls can be followed."""
    return [own for own in recorded if own.signature]


def _recorded(subject: Subject) -> tuple[Path, list[Recorded]]:
    folder = signatures.package_folder(subject.backend.record.package)
    return (Path(), []) if folder is None else (folder, signatures.read(folder))
