"""L1: the backend's calls into its kernel library fit the library, as recorded and as installed."""

from __future__ import annotations

from importlib.util import find_spec

from dsv4core.testing import signatures
from dsv4core.testing.calls import calls
from dsv4core.testing.signatures import Recorded
from dsv4core.testing.source import FILE, Source, source_of
from dsv4core.testing.subject import Elsewhere, Subject
from dsv4core.testing.suite.marks import check


@check("L1", core=True, reports=("vllm#48054", "vllm#58069"))
def test_calls_fit_the_recorded_signatures(dsv4: Subject) -> None:
    """Every call of a recorded function binds, and every recorded function is called."""
    source, recorded = _recorded(dsv4)
    needs = [need.module for need in dsv4.info.requirements]
    known = {own.target.partition(".")[0] for own in recorded}
    missing = [name for name in needs if name.partition(".")[0] not in known]
    assert not missing, (
        f"It needs {', '.join(missing)}, and {FILE} in its package records no function of theirs; "
        "write it with `python -m dsv4core.testing.signatures`."
    )
    functions = _functions(recorded)
    found = calls(source, [own.target for own in functions])
    for own in functions:
        assert found[own.target], (
            f"{own.target} is recorded, and nothing calls it, as far as names can be followed; record what "
            "is called, or the library alone."
        )
        problems = [text for call in found[own.target] if (text := call.problem(own.parsed))]
        assert not problems, f"{own.target}{own.signature} of {own.distribution}: {'; '.join(problems)}."


@check("L1", reports=("vllm#48054", "vllm-plugin-FL#125"))
def test_calls_fit_the_installed_library(dsv4: Subject) -> None:
    """The same for what is installed here."""
    source, recorded = _recorded(dsv4)
    functions = _functions(recorded)
    modules = {own.target.partition(".")[0] for own in functions}
    absent = sorted(module for module in modules if find_spec(module) is None)
    if absent:
        raise Elsewhere(f"{', '.join(absent)} is not installed here.")
    found = calls(source, [own.target for own in functions])
    for own in functions:
        signature = signatures.installed(own.target)
        problems = [text for call in found[own.target] if (text := call.problem(signature))]
        assert not problems, f"{own.target}{signature} is installed, and: {'; '.join(problems)}."


def _functions(recorded: list[Recorded]) -> list[Recorded]:
    """Those whose calls can be followed."""
    return [own for own in recorded if own.signature]


def _recorded(subject: Subject) -> tuple[Source, list[Recorded]]:
    source = source_of(subject.backend.record.package)
    return source, signatures.read(source)
