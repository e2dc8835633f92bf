"""Calls into a kernel library that moved are found in a backend's source, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dsv4core.api import DSV4Error
from dsv4core.testing import signatures
from dsv4core.testing.calls import calls
from dsv4core.testing.fakes import FAKE_BACKEND, altered, declare_backends, install_backend, isolate
from dsv4core.testing.source import source_of
from dsv4core.testing.subject import Elsewhere, Subject
from dsv4core.testing.suite.test_calls import (
    test_calls_fit_the_installed_library as installed_check,
)
from dsv4core.testing.suite.test_calls import (
    test_calls_fit_the_recorded_signatures as recorded_check,
)

LIBRARY = "def attend(q, cache, /, block_table, scale=1.0, *, lens=None, **rest): ...\ndef plan(a): ...\n"
KERNELS = """\
import fast_kernels
from fast_kernels import attend


def run(q, cache, table, options):
    attend(q, cache, table, lens=3)
    fast_kernels.attend(q, cache, block_table=table, scale=2.0, **options)
"""
REQUIREMENT = (
    "capabilities=frozenset(),",
    'capabilities=frozenset(), requirements=(Requirement("fast_kernels", "fast-kernels", "pip"),),',
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backend in a package, with kernels that call a library."""
    folder = tmp_path / "fast_backend"
    folder.mkdir()
    source = altered(
        REQUIREMENT, ("    hookimpl,\n", "    Requirement,\n    hookimpl,\n"), source=FAKE_BACKEND
    )
    (folder / "__init__.py").write_text("")
    (folder / "plugin.py").write_text(source)
    (folder / "kernels.py").write_text(KERNELS)
    (tmp_path / "fast_kernels.py").write_text(LIBRARY)
    declare_backends(tmp_path, "fast", {"fast": "fast_backend.plugin"})
    isolate(tmp_path, monkeypatch)
    for name in ("fast_kernels", "fast_backend", "fast_backend.plugin"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def test_what_is_recorded(package: Path) -> None:
    signatures.main(["fast_backend", "fast_kernels.attend"])
    (entry,) = json.loads((package / "signatures.json").read_text())
    assert entry["target"] == "fast_kernels.attend"
    assert entry["signature"] == "(q, cache, /, block_table, scale=..., *, lens=..., **rest)"
    (recorded,) = signatures.read(source_of("fast_backend"))
    assert [own.kind.name for own in recorded.parsed.parameters.values()] == [
        "POSITIONAL_ONLY",
        "POSITIONAL_ONLY",
        "POSITIONAL_OR_KEYWORD",
        "POSITIONAL_OR_KEYWORD",
        "KEYWORD_ONLY",
        "VAR_KEYWORD",
    ]
    recorded_check(Subject("fast"))
    installed_check(Subject("fast"))


def test_a_library_that_is_not_recorded(package: Path) -> None:
    with pytest.raises(
        AssertionError, match="It needs fast_kernels, and signatures.json in its package records"
    ):
        recorded_check(Subject("fast"))


MOVED = [
    ("def attend(q, cache, block_table, scale=1.0): ...", "kernels.py:6: got an unexpected keyword .*'lens'"),
    (
        "def attend(q, cache, table, lens=None, **rest): ...",
        "kernels.py:7: missing a required argument: 'table'",
    ),
]


@pytest.mark.parametrize(("library", "text"), MOVED[:1])
def test_a_keyword_that_moved(package: Path, library: str, text: str) -> None:
    (package.parent / "fast_kernels.py").write_text(library)
    signatures.main(["fast_backend", "fast_kernels.attend"])
    for check in (recorded_check, installed_check):
        with pytest.raises(AssertionError, match=text):
            check(Subject("fast"))


def test_a_recorded_function_that_nobody_calls(package: Path) -> None:
    signatures.main(["fast_backend", "fast_kernels.attend", "fast_kernels.plan"])
    with pytest.raises(AssertionError, match=r"fast_kernels.plan is recorded, and nothing calls it"):
        recorded_check(Subject("fast"))


def test_a_library_whose_calls_cannot_be_followed(package: Path) -> None:
    (package / "kernels.py").write_text("import fast_kernels\n\nrun = fast_kernels.kernel[1]\n")
    signatures.main(["fast_backend", "fast_kernels"])
    recorded_check(Subject("fast"))
    installed_check(Subject("fast"))


def test_functions_of_the_same_name_elsewhere(package: Path) -> None:
    """Only files that import the library can call it."""
    (package / "other.py").write_text("def attend(): ...\n\n\nattend()\n")
    signatures.main(["fast_backend", "fast_kernels.attend"])
    recorded_check(Subject("fast"))


# Each calls `attend` in the line with `!`, with a keyword that it no longer has.
FOLLOWED = {
    "another name": """
from fast_kernels import attend as run
run(q, cache, table, lens=3)  # !
""",
    "a module's other name": """
import fast_kernels.decode as fd
fd.attend(q, cache, table, lens=3)  # !
""",
    "a name in a module": """
import fast_kernels
run = fast_kernels.attend
def forward(q, cache, table):
    return run(q, cache, table, lens=3)  # !
""",
    "a name in a function": """
def forward(q, cache, table):
    import fast_kernels
    run = fast_kernels.attend
    return run(q, cache, table, lens=3)  # !
""",
    "two names": """
from fast_kernels import attend
run, other = attend, None
run(q, cache, table, lens=3)  # !
""",
    "one of two functions": """
import fast_kernels, slow_kernels
run = fast_kernels.attend if fast else slow_kernels.attend
run(q, cache, table, lens=3)  # !
""",
    "a name in one of two branches": """
import slow_kernels
run = slow_kernels.attend
if fast:
    import fast_kernels
    run = fast_kernels.attend
run(q, cache, table, lens=3)  # !
""",
    "an attribute of the object": """
import fast_kernels
class Layer:
    def __init__(self):
        self.run = fast_kernels.attend
    def forward(self, q, cache, table):
        return self.run(q, cache, table, lens=3)  # !
""",
    "an attribute of the class": """
import fast_kernels
class Layer:
    run = staticmethod(fast_kernels.attend)
    def forward(self, q, cache, table):
        return self.run(q, cache, table, lens=3)  # !
""",
    "a cached property": """
class Layer:
    @cached_property
    def run(self):
        from fast_kernels import attend
        return attend
    def forward(self, q, cache, table):
        return self.run(q, cache, table, lens=3)  # !
""",
    "a dataclass by keyword": """
import fast_kernels
@dataclass
class State:
    run: Any
def init():
    return State(run=fast_kernels.attend)
def forward(state, q, cache, table):
    return state.run(q, cache, table, lens=3)  # !
""",
    "a module in a dataclass, imported late": """
@dataclass
class State:
    weights: Any
    kernels: Any
def init(weights):
    import fast_kernels
    return State(weights, fast_kernels)
def forward(state, q, cache, table):
    return state.kernels.attend(q, cache, table, lens=3)  # !
""",
    "a module that an object was made with": """
class Layer:
    def __init__(self, kernels):
        self.own = kernels
    def forward(self, q, cache, table):
        return self.own.attend(q, cache, table, lens=3)  # !
def init():
    import fast_kernels
    return Layer(fast_kernels)
""",
    "an object of no class": """
import fast_kernels
def forward(state, q, cache, table):
    return state.run(q, cache, table, lens=3)  # !
forward(SimpleNamespace(run=fast_kernels.attend))
state.run = fast_kernels.attend
""",
    "a replaced attribute": """
import dataclasses, fast_kernels
def forward(state, q, cache, table):
    state = dataclasses.replace(state, run=fast_kernels.attend)
    return state.run(q, cache, table, lens=3)  # !
""",
    "an argument": """
import fast_kernels
def call(function, *arguments):
    return function(*arguments, lens=3)  # !
call(fast_kernels.attend, q, cache, table)
""",
    "a function that imports": """
def library():
    import fast_kernels
    return fast_kernels
library().attend(q, cache, table, lens=3)  # !
""",
    "a global": """
kernels = None
def load():
    global kernels
    import fast_kernels as kernels
def forward(q, cache, table):
    return kernels.attend(q, cache, table, lens=3)  # !
""",
    "a partial's own keyword": """
import functools, fast_kernels
run = functools.partial(fast_kernels.attend, scale=2.0, lens=3)  # !
""",
    "getattr": """
import fast_kernels
getattr(fast_kernels, "attend")(q, cache, table, lens=3)  # !
""",
    "import_module": """
from importlib import import_module
import_module("fast_kernels").attend(q, cache, table, lens=3)  # !
""",
    "a wrapper that changes nothing": """
import torch, fast_kernels
run = torch.compile(fast_kernels.attend)
run(q, cache, table, lens=3)  # !
""",
    "a wrapper that is not known": """
import wrappers
from fast_kernels import attend
attend = wrappers.wrap(attend)
attend(q, cache, table, lens=3)  # !
""",
    "nothing to follow": """
import fast_kernels
def forward(kernels, q, cache, table):
    return kernels.attend(q, cache, table, lens=3)  # !
""",
    "everything of the library": """
from fast_kernels import *
attend(q, cache, table, lens=3)  # !
""",
}
MOVED_LIBRARY = "def attend(q, cache, block_table, scale=1.0): ...\n"


def line_of(source: str) -> int:
    return next(number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# !"))


def problems(folder: Path, source: str, *targets: str) -> list[str | None]:
    """What is wrong with each call of recorded functions, one function after the other."""
    (folder / "kernels.py").write_text(source)
    signatures.main(["fast_backend", *(targets or ["fast_kernels.attend"])])
    package = source_of("fast_backend")
    recorded = signatures.read(package)
    found = calls(package, [own.target for own in recorded])
    return [call.problem(own.parsed) for own in recorded for call in found[own.target]]


@pytest.mark.parametrize("case", FOLLOWED)
def test_calls_are_followed(package: Path, case: str) -> None:
    (package / "kernels.py").write_text(FOLLOWED[case])
    (package.parent / "fast_kernels.py").write_text(MOVED_LIBRARY)
    signatures.main(["fast_backend", "fast_kernels.attend"])
    with pytest.raises(AssertionError) as failure:
        recorded_check(Subject("fast"))
    assert str(failure.value).startswith(
        "fast_kernels.attend(q, cache, block_table, scale=...) of : "
        f"kernels.py:{line_of(FOLLOWED[case])}: got an unexpected keyword argument 'lens'."
    )


PARTIAL = """\
from functools import partial
import fast_kernels
run = partial(fast_kernels.attend, q, scale=2.0)
run = partial(run, cache)
"""
LATER = [
    ("run(table)", None),
    ("run(table, scale=3.0)", None),
    ("run()", "missing a required argument: 'block_table'"),
    ("run(table, 3.0)", "multiple values for argument 'scale'"),
    ("run(table, lens=3)", "got an unexpected keyword argument 'lens'"),
]


@pytest.mark.parametrize(("later", "problem"), LATER)
def test_a_partial_is_called(package: Path, later: str, problem: str | None) -> None:
    (package.parent / "fast_kernels.py").write_text(MOVED_LIBRARY)
    assert problems(package, PARTIAL + later) == [None, None, problem and f"kernels.py:5: {problem}"]


STARS = [
    ("attend(*both, table)", None),
    ("attend(*both, table, 1.0, 2.0, 3.0, 4.0)", "too many positional arguments"),
    ("attend(*both, scale=1.0, lens=3)", "got an unexpected keyword argument 'lens'"),
    ("attend(*both)", "missing a required argument: 'pages'"),
    ("attend(*both, **options)", None),
    ("attend(**options)", "missing a required argument: 'q'"),
    ("attend(q, cache, table, **options)", None),
    ("attend(q, cache, table, lens=3, **options)", "got an unexpected keyword argument 'lens'"),
]


@pytest.mark.parametrize(("call", "problem"), STARS)
def test_what_stars_leave_to_check(package: Path, call: str, problem: str | None) -> None:
    library = "def attend(q, cache, /, block_table, scale=1.0, *, pages): ...\n"
    (package.parent / "fast_kernels.py").write_text(library)
    if "missing" not in str(problem) and "**" not in call:
        call = call.replace(")", ", pages=4)")
    found = problems(package, f"from fast_kernels import attend\n{call}\n")
    assert found == [problem and f"kernels.py:2: {problem}"]


# None of these calls the library's function; one that does follows.
ELSEWHERE = {
    "another library's": """
import fast_kernels, slow_kernels
slow_kernels.attend(1)
""",
    "another library's, in a function": """
import fast_kernels
def forward():
    from slow_kernels import attend
    attend(1)
""",
    "a method of another library's object": """
import fast_kernels, slow_kernels
planner = slow_kernels.Planner()
planner.attend(1)
""",
    "a method": """
import fast_kernels
class Layer:
    def attend(self, q): ...
    def forward(self, q):
        self.attend(q)
def forward(layer, q):
    layer.attend(q)
""",
    "a function": """
import fast_kernels
def attend(q): ...
attend(1)
""",
    "a function of another file": """
import fast_kernels
from .own import attend
from . import own
attend(1)
own.attend(1)
""",
    "a lambda": """
import fast_kernels
attend = lambda q: q
attend(1)
""",
    "a name that changed": """
from fast_kernels import attend as run
def forward():
    from slow_kernels import attend as run
    run(1)
run = str
run(1)
""",
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_functions_of_the_same_name(package: Path, case: str) -> None:
    (package / "own.py").write_text("def attend(q): ...\n")
    right = "def right(q, cache, table):\n    import fast_kernels\n    fast_kernels.attend(q, cache, table)\n"
    assert problems(package, ELSEWHERE[case] + right) == [None]


def test_a_name_that_another_file_gives(package: Path) -> None:
    (package / "library.py").write_text("try:\n    import fast_kernels\nexcept ImportError:\n    pass\n")
    (package / "functions.py").write_text("from .library import fast_kernels as own\nrun = own.attend\n")
    source = "from . import functions\nfrom .functions import run\nrun(1)\nfunctions.run(1)\n"
    missing = "missing a required argument: 'cache'"
    assert problems(package, source) == [f"kernels.py:3: {missing}", f"kernels.py:4: {missing}"]


# A file that imports the library, and one that does not and calls `attend` in the line with `!`.
KEPT = {
    "in a dataclass": (
        """
from .kernels import State
def init(weights):
    import fast_kernels
    return State(weights, fast_kernels)
""",
        """
@dataclass
class State:
    weights: Any
    library: Any
def forward(state):
    state.library.attend(1)  # !
""",
    ),
    "in a dataclass of functions": (
        """
import fast_kernels
from . import kernels
kernels.State(kernels.Functions(run=fast_kernels.attend))
""",
        """
class Functions(NamedTuple):
    run: Any
class State(NamedTuple):
    own: Functions
def forward(state):
    state.own.run(1)  # !
""",
    ),
    "by a function": (
        """
def library():
    import fast_kernels
    return fast_kernels
""",
        """
from .layer import library
library().attend(1)  # !
""",
    ),
    "in a global": (
        """
own = None
def load():
    global own
    import fast_kernels as own
""",
        """
from . import layer
layer.own.attend(1)  # !
""",
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_library_that_another_file_keeps(package: Path, case: str) -> None:
    layer, kernels = KEPT[case]
    (package / "layer.py").write_text(layer)
    missing = f"kernels.py:{line_of(kernels)}: missing a required argument: 'cache'"
    assert problems(package, kernels) == [missing]


def test_two_functions_of_one_name(package: Path) -> None:
    """Each call is held against its own; a third place of the library may have either."""
    library = package.parent / "fast_kernels"
    (package.parent / "fast_kernels.py").unlink()
    library.mkdir()
    (library / "__init__.py").write_text("")
    (library / "decode.py").write_text("def attend(a): ...\n")
    (library / "prefill.py").write_text("def attend(a, b): ...\n")
    source = "from fast_kernels import decode, prefill\ndecode.attend(1)\nprefill.attend(1, 2)\n"
    targets = ("fast_kernels.decode.attend", "fast_kernels.prefill.attend")
    assert problems(package, source, *targets) == [None, None]
    assert problems(package, "import fast_kernels\nfast_kernels.attend(1)\n", *targets) == [
        None,
        "kernels.py:2: missing a required argument: 'b'",
    ]


def test_a_backend_that_is_a_single_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = altered(REQUIREMENT, ("    hookimpl,\n", "    Requirement,\n    hookimpl,\n"))
    late = "def run(q):\n    import fast_kernels\n    fast_kernels.attend(q, 1, 2, lens=3)\n"
    install_backend(tmp_path, "fast", source + late)
    (tmp_path / "fast_kernels.py").write_text(LIBRARY)
    isolate(tmp_path, monkeypatch)
    monkeypatch.delitem(sys.modules, "fast_kernels", raising=False)
    signatures.main(["fake_fast", "fast_kernels.attend"])
    recorded_check(Subject("fast"))
    recorded = tmp_path / "fake_fast.signatures.json"
    recorded.write_text(recorded.read_text().replace("lens", "lengths").replace(", **rest", ""))
    line = (source + late).count("\n")
    with pytest.raises(
        AssertionError, match=f"fake_fast.py:{line}: got an unexpected keyword argument 'lens'"
    ):
        recorded_check(Subject("fast"))


def test_a_library_that_is_not_installed(package: Path) -> None:
    signatures.main(["fast_backend", "fast_kernels.attend"])
    text = (package / "signatures.json").read_text().replace("fast_kernels", "absent_kernels")
    (package / "signatures.json").write_text(text)
    with pytest.raises(Elsewhere, match=r"absent_kernels is not installed here\."):
        installed_check(Subject("fast"))


MISTAKES = [
    ([], "Write: python -m dsv4core.testing.signatures PACKAGE MODULE.FUNCTION …"),
    (["wave", "a.b"], "'wave' is the package of no installed backend; those are "),
    (
        ["fast_backend", "fast_kernels.zzz"],
        "fast_kernels.zzz cannot be recorded: module 'fast_kernels' has no ",
    ),
]


@pytest.mark.parametrize(("words", "text"), MISTAKES)
def test_mistakes(package: Path, words: list[str], text: str) -> None:
    with pytest.raises(DSV4Error) as error:
        signatures.main(words)
    assert str(error.value).startswith(text)
