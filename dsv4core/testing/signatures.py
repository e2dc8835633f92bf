"""Calls into a kernel library, held against its recorded signatures: a keyword that moved is found on a CPU.

A backend's package keeps `signatures.json` beside its modules:

    python -m dsv4core.testing.signatures dsv4_plugin_acme acme_kernels.sparse_mla acme_kernels.make_plan

writes it from the installed library. Only functions that are called by their own name can be followed, in
files that import the library. Of a library without such calls (Triton's kernels, `torch.ops`) the module
alone is recorded:

    python -m dsv4core.testing.signatures dsv4_plugin_acme triton
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from dsv4core.api import DSV4Error

FILE = "signatures.json"


@dataclass(frozen=True)
class Recorded:
    """A function of a kernel library, or a library whose calls cannot be followed.

    Attributes:
        target: `module.function`, or a module.
        signature: Its parameters, without annotations; defaults are `...`; empty for a module.
        distribution: Who provided it, and in which version.
    """

    target: str
    signature: str
    distribution: str

    @property
    def parsed(self) -> inspect.Signature:
        """The signature as an object."""
        tree = ast.parse(f"def function{self.signature}: ...").body[0]
        assert isinstance(tree, ast.FunctionDef)
        return _signature(tree.args)


@dataclass(frozen=True)
class Call:
    """A call in a backend's source.

    Attributes:
        place: File and line.
        positional: Number of positional arguments.
        keywords: Keywords; `**` arguments cannot be followed.
        starred: Whether there are `*` or `**` arguments.
    """

    place: str
    positional: int
    keywords: tuple[str, ...]
    starred: bool

    def problem(self, signature: inspect.Signature) -> str | None:
        """Why it does not fit a signature, or None."""
        bind = signature.bind_partial if self.starred else signature.bind
        try:
            bind(*[None] * self.positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"{self.place}: {error}"
        return None


def package_folder(package: str) -> Path | None:
    """The folder of a package's source; None where it is a single module. Nothing is imported but parents.

    Raises:
        DSV4Error: There is no such package.
    """
    spec = find_spec(package)
    if spec is None:
        raise DSV4Error(f"No package is named {package!r}; name the backend's import package.")
    places = list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else None


def read(folder: Path) -> list[Recorded]:
    """The recorded signatures of a package; none where it has no file."""
    file = folder / FILE
    return [Recorded(**entry) for entry in json.loads(file.read_text())] if file.exists() else []


def calls(folder: Path, target: str) -> list[Call]:
    """All calls of a function in a package's source, by the function's own name."""
    library, name, found = target.partition(".")[0], target.rpartition(".")[2], []
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if not any(library in _imported(node) for node in ast.walk(tree)):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) == name:
                starred = any(isinstance(argument, ast.Starred) for argument in node.args)
                named = tuple(word.arg for word in node.keywords if word.arg is not None)
                starred = starred or len(named) < len(node.keywords)
                count = sum(not isinstance(argument, ast.Starred) for argument in node.args)
                found.append(Call(f"{file.relative_to(folder)}:{node.lineno}", count, named, starred))
    return found


def record(target: str) -> Recorded:
    """The signature of an installed function, or a module by itself.

    Raises:
        DSV4Error: It is not there, or tells nothing of its parameters.
    """
    if "." not in target:
        return Recorded(target, "", _source(target))
    try:
        signature = installed(target)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise DSV4Error(f"{target} cannot be recorded: {error}. Install its library first.") from error
    plain = [
        own.replace(annotation=own.empty, default=own.default if own.default is own.empty else ...)
        for own in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return Recorded(target, text.replace("Ellipsis", "..."), _source(target.partition(".")[0]))


def installed(target: str) -> inspect.Signature:
    """The signature of `module.function` as it is installed; raises what importing it raises."""
    module, _, name = target.rpartition(".")
    return inspect.signature(getattr(import_module(module), name))


def main(arguments: Sequence[str]) -> None:
    """Write a package's file.

    Raises:
        DSV4Error: An argument names nothing.
    """
    if len(arguments) < 2:
        raise DSV4Error("Write: python -m dsv4core.testing.signatures PACKAGE MODULE.FUNCTION …")
    package, *targets = arguments
    folder = package_folder(package)
    if folder is None:
        raise DSV4Error(f"{package} is a single module; signatures are kept in a package's folder.")
    entries = [vars(record(target)) for target in targets]
    (folder / FILE).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def _source(module: str) -> str:
    names = set(packages_distributions().get(module, ()))
    return ", ".join(sorted(f"{name} {version(name)}" for name in names))


def _imported(node: ast.AST) -> set[str]:
    """The top-level packages that a statement imports."""
    if isinstance(node, ast.Import):
        return {own.name.partition(".")[0] for own in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.partition(".")[0]}
    return set()


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _signature(arguments: ast.arguments) -> inspect.Signature:
    return inspect.Signature(list(_parameters(arguments)))


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    plain = [*arguments.posonlyargs, *arguments.args]
    required = len(plain) - len(arguments.defaults)
    kind = inspect.Parameter
    for number, own in enumerate(plain):
        only = number < len(arguments.posonlyargs)
        default = kind.empty if number < required else ...
        yield kind(own.arg, kind.POSITIONAL_ONLY if only else kind.POSITIONAL_OR_KEYWORD, default=default)
    if arguments.vararg is not None:
        yield kind(arguments.vararg.arg, kind.VAR_POSITIONAL)
    for own, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield kind(own.arg, kind.KEYWORD_ONLY, default=kind.empty if value is None else ...)
    if arguments.kwarg is not None:
        yield kind(arguments.kwarg.arg, kind.VAR_KEYWORD)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DSV4Error as error:
        sys.exit(str(error))
