"""Each wrong backend fails the check that is meant for it, for the reason intended; a right one passes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4core.api import OWN_OPS
from dsv4core.testing.fakes import declare_backends, isolate
from dsv4core.testing.subject import Subject
from dsv4core.testing.suite import checks
from tests.suite.mutants import MUTANTS, Reference


@pytest.fixture
def mutants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are installed as backends of one distribution, and a backend that is right."""
    own = {name: f"tests.suite.test_mutants:BACKENDS.{name}" for name in vars(BACKENDS)}
    declare_backends(tmp_path, "mutants", {"reference": "dsv4core.backends.reference", **own})
    isolate(tmp_path, monkeypatch)


class Right(Reference):
    """Owns everything, and does it as the core does, but for one thing: products depend on the batch."""

    own, capabilities = OWN_OPS, frozenset({"graph"})


class Backends:
    """One object a backend."""


BACKENDS = Backends()
for name, kind in {**MUTANTS, "right": Right}.items():
    setattr(BACKENDS, name, kind())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_backend_fails_for_the_reason_intended(mutants: None, name: str) -> None:
    mutant = MUTANTS[name]
    with pytest.raises(AssertionError) as failure:
        checks()[mutant.check](Subject(name), **mutant.arguments)
    assert mutant.says in str(failure.value)


SERVED = [name for name, mutant in MUTANTS.items() if "deterministic" not in mutant.capabilities]


@pytest.mark.parametrize("name", SERVED)
def test_a_right_backend_passes_that_check(mutants: None, name: str) -> None:
    """The same check, so that it is the change that it sees."""
    mutant = MUTANTS[name]
    checks()[mutant.check](Subject("right"), **mutant.arguments)
