"""Calls into a kernel library, held against its recorded signatures: a keyword that moved is found on a CPU.

A backend's package keeps `signatures.json` beside its modules, a backend that is the single module `wave.py`
keeps `wave.signatures.json`:

    python -m dsv4core.testing.signatures dsv4_plugin_acme acme_kernels.sparse_mla acme_kernels.make_plan

writes it from the installed library. Calls are followed through imports, other names, attributes, arguments
and `functools.partial`. Of a library whose calls cannot be followed (Triton's kernels, `torch.ops`) the
module alone is recorded:

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

from dsv4core.api import DSV4Error
from dsv4core.framework.discovery import discover
from dsv4core.testing.source import Source, source_of


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
        return signature_of(tree.args)


def read(source: Source) -> list[Recorded]:
    """The recorded signatures of a package; none where it has no file."""
    file = source.signatures
    return [Recorded(**entry) for entry in json.loads(file.read_text())] if file.exists() else []


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
        DSV4Error: An argument names nothing, or the package is no backend's.
    """
    if len(arguments) < 2:
        raise DSV4Error("Write: python -m dsv4core.testing.signatures PACKAGE MODULE.FUNCTION …")
    package, *targets = arguments
    backends = {own.package: own.name for own in discover().values()}
    if package not in backends:
        raise DSV4Error(
            f"{package!r} is the package of no installed backend; those are {', '.join(backends)}. Install "
            "yours with `pip install -e .` first."
        )
    source = source_of(package)
    entries = [vars(record(target)) for target in targets]
    source.signatures.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    print(f"{source.signatures}: {len(entries)} recorded")


def _source(module: str) -> str:
    names = set(packages_distributions().get(module, ()))
    return ", ".join(sorted(f"{name} {version(name)}" for name in names))


def signature_of(arguments: ast.arguments) -> inspect.Signature:
    """Parameters as source has them: without annotations; defaults are `...`."""
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
