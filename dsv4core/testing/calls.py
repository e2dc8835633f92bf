"""Calls of recorded functions in a backend's source, and whether their arguments fit."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from dsv4core.testing.meanings import PARTIAL, Meaning, Meanings, Reading
from dsv4core.testing.scopes import Site, last_name, read
from dsv4core.testing.source import Source


@dataclass(frozen=True)
class Call:
    """A call in a backend's source.

    Attributes:
        place: File and line.
        positional: Number of positional arguments that are written out.
        keywords: Keywords that are written out.
        star: Whether there is a `*` argument, of unknown length.
        double_star: Whether there is a `**` argument, of unknown keywords.
    """

    place: str
    positional: int
    keywords: tuple[str, ...] = ()
    star: bool = False
    double_star: bool = False

    def problem(self, signature: inspect.Signature) -> str | None:
        """Why it does not fit a signature, or None."""
        try:
            bound = signature.bind_partial(*[None] * self.positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"{self.place}: {error}"
        for name, own in signature.parameters.items():
            if name not in bound.arguments and self._has_to_give(own):
                return f"{self.place}: missing a required argument: {name!r}"
        return None

    def _has_to_give(self, own: inspect.Parameter) -> bool:
        """Whether a parameter needs an argument that no `*` or `**` can hold."""
        by_position = own.kind in (own.POSITIONAL_ONLY, own.POSITIONAL_OR_KEYWORD)
        by_name = own.kind in (own.KEYWORD_ONLY, own.POSITIONAL_OR_KEYWORD)
        held = (self.star and by_position) or (self.double_star and by_name)
        return own.default is own.empty and (by_position or by_name) and not held


def calls(source: Source, targets: Sequence[str]) -> dict[str, list[Call]]:
    """All calls of functions in a package's source, by function.

    A function under another name of its library is the same one, unless that name is a target, too. Where
    reading cannot tell what is called, its last name counts in files that import the library: none gets lost.

    Args:
        source: The package.
        targets: The functions, as `module.function`.
    """
    code = read(source)
    reading = Reading.of(code)
    found: dict[str, list[Call]] = {target: [] for target in targets}
    for site in code.sites:
        uses = [
            (target, _call(site, own))
            for own in _functions(reading, site)
            for target in _targets(own.name, targets, source.package)
        ]
        if not uses and _is_unknown(reading.meanings(site.node.func, site.scope), source.package):
            uses = [(target, _call(site)) for target in targets if _may_be(site, target)]
        for target, call in uses:
            found[target].append(call)
    return found


def _functions(reading: Reading, site: Site) -> Meanings:
    """What is called, or what is given arguments for a later call."""
    functions = reading.meanings(site.node.func, site.scope)
    partial = Meaning(PARTIAL) in functions
    return functions | reading.meanings(site.node, site.scope) if partial else functions


def _call(site: Site, function: Meaning | None = None) -> Call:
    """The arguments of a call, with those that were given before."""
    given = function.partial if function else ()
    later = site.node in given  # `partial` itself: others follow
    nodes = given if later else (*given, site.node)
    plain = [own for node in nodes for own in (node.args[1:] if node in given else node.args)]
    words = [own.arg for node in nodes for own in node.keywords]
    count = sum(not isinstance(own, ast.Starred) for own in plain)
    named = tuple(own for own in words if own is not None)
    return Call(site.place, count, named, later or count < len(plain), later or len(named) < len(words))


def _targets(name: str, targets: Sequence[str], package: str) -> list[str]:
    """The targets that a name is: itself, or its namesakes of the same library."""
    if name in targets or name.startswith(f"{package}."):
        return [name] if name in targets else []
    return [own for own in targets if _ends(own) == _ends(name)]


def _ends(name: str) -> tuple[str, str]:
    return name.partition(".")[0], name.rpartition(".")[2]


def _is_unknown(meanings: Meanings, package: str) -> bool:
    """Whether nothing but calls of other libraries' functions gave what is called."""
    return all(own.name.endswith("()") and not own.name.startswith(f"{package}.") for own in meanings)


def _may_be(site: Site, target: str) -> bool:
    library, name = _ends(target)
    return library in site.imported and last_name(site.node.func) == name
