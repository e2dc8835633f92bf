"""What an expression in a package's source stands for, as far as reading tells.

A meaning is a dotted name: `acme_kernels.attend` of a library, `wave.layer.Layer` of the package itself, and
`wave.layer.Layer()` for what a call of it gives. An expression has several where branches differ, and none
where reading cannot tell.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile

from dsv4core.testing.scopes import END, RETURN, Binding, Code, Imported, Position, Scope, Site, start_of

PARTIAL = "functools.partial"
ALIKE = frozenset({"builtins.staticmethod", "torch.compile", "torch.compiler.disable", "functools.cache"})
"""What they give is called as what they are given."""
FAR = 16
"""Steps from name to name after which reading gives up."""
PASSED_ON = 4
"""Functions that pass an argument on, likewise."""


@dataclass(frozen=True)
class Meaning:
    """What an expression may stand for.

    Attributes:
        name: The dotted name.
        partial: The calls of `functools.partial` that gave arguments before.
    """

    name: str
    partial: tuple[ast.Call, ...] = ()

    def with_arguments_of(self, node: ast.Call) -> Meaning:
        """The same, with the arguments of one more `functools.partial`."""
        return replace(self, partial=(*self.partial, node))


Meanings = frozenset[Meaning]


@dataclass(frozen=True)
class Reading:
    """Follows names through what was read.

    Attributes:
        code: What was read.
        known: What bindings that were met stand for.
        attributes: All attributes by name, whosoever they are.
        passed: The calls whose arguments were bound to parameters and fields of a callee.
    """

    code: Code
    known: dict[Binding, Meanings] = field(default_factory=dict)
    attributes: dict[str, list[Binding]] = field(default_factory=dict)
    passed: set[tuple[str, ast.Call]] = field(default_factory=set)

    @classmethod
    def of(cls, code: Code) -> Reading:
        """With all names followed, and with what the package's calls of its own pass for parameters."""
        reading = cls(code)
        for _ in range(PASSED_ON):
            reading._settle()
            before = len(reading.passed)
            for site, callees in [(own, reading.meanings(own.node.func, own.scope)) for own in code.sites]:
                for callee in callees:
                    reading._pass(callee, site)
            if len(reading.passed) == before:
                break
        return reading

    def _settle(self) -> None:
        """Follow each binding one step further, until there is nothing new: cycles end, too."""
        self.attributes.clear()
        for bindings in (*(own.bindings for own in self.code.classes), self.code.attributes):
            for name, found in bindings.items():
                self.attributes.setdefault(name, []).extend(found)
        for site in self.code.sites:
            self.meanings(site.node, site.scope)
        for _ in range(FAR):
            before = dict(self.known)
            for binding in before:
                self.known[binding] = self._value(binding)
            if self.known == before:
                break

    def meanings(self, node: ast.expr, scope: Scope) -> Meanings:
        """What an expression may stand for where it stands."""
        if isinstance(node, ast.Name):
            return self._name(node.id, scope, start_of(node))
        if isinstance(node, ast.Attribute):
            return self._attribute(node.value, node.attr, scope)
        if isinstance(node, ast.Call):
            return _union(self._result(own, node, scope) for own in self.meanings(node.func, scope))
        if isinstance(node, ast.Lambda):
            return frozenset({Meaning(f"{scope.name}.<lambda>")})
        return _union(self.meanings(part, scope) for part in _alternatives(node))

    def _name(self, name: str, scope: Scope, position: Position) -> Meanings:
        inner: Scope | None = scope
        while inner is not None:
            if name in inner.bindings and (inner is scope or not inner.is_class):
                return self._values(_reaching(inner.bindings[name], position if inner is scope else END))
            inner = inner.outer
        return frozenset({Meaning(f"builtins.{name}")} if hasattr(builtins, name) else ())

    def _attribute(self, owner: ast.expr, name: str, scope: Scope) -> Meanings:
        owners = self.meanings(owner, scope)
        return _union(self._member(own.name, name) for own in owners) if owners else self._anyones(name)

    def _member(self, owner: str, name: str) -> Meanings:
        """An attribute of a module, of a class, or of an object."""
        if owner in self.code.modules:
            found = self._values(_reaching(self.code.modules[owner].bindings.get(name, []), END))
            return found or frozenset({Meaning(f"{owner}.{name}")})
        classes = self.code.defined.get(owner.removesuffix("()"))
        if classes:
            found = self._values(own for scope in classes for own in scope.bindings.get(name, ()))
            return found or self._anyones(name)
        if "()" in owner:
            given = self._values(self.code.attributes.get(name, ()))
            return given | {Meaning(f"{_some(owner)}.{name}")}
        return frozenset({Meaning(f"{owner}.{name}")})

    def _anyones(self, name: str) -> Meanings:
        """An attribute of that name of whatever object of the package."""
        return self._values(self.attributes.get(name, ()))

    def _result(self, callee: Meaning, node: ast.Call, scope: Scope) -> Meanings:
        """What a call gives."""
        words = [own.value if isinstance(own, ast.Constant) else None for own in node.args[:2]]
        if callee.name == PARTIAL and words:
            functions = self.meanings(node.args[0], scope)
            return frozenset(own if node in own.partial else own.with_arguments_of(node) for own in functions)
        if callee.name in ALIKE and words:
            return self.meanings(node.args[0], scope)
        if callee.name == "builtins.getattr" and len(words) > 1 and isinstance(words[1], str):
            return self._attribute(node.args[0], words[1], scope)
        if callee.name == "importlib.import_module" and words and isinstance(words[0], str):
            return frozenset({Meaning(words[0])})
        return self._called(callee.name)

    def _called(self, name: str) -> Meanings:
        scopes = self.code.defined.get(name)
        if not scopes:
            return frozenset({Meaning(_some(name))})
        if scopes[0].is_class:
            return frozenset({Meaning(f"{name}()")})
        return self._values(own for scope in scopes for own in scope.bindings.get(RETURN, ()))

    def _values(self, bindings: Iterable[Binding]) -> Meanings:
        return _union(self.known.setdefault(own, frozenset()) for own in bindings)

    def _value(self, binding: Binding) -> Meanings:
        value = binding.value
        if isinstance(value, str):
            return self._called(value[:-2]) if value.endswith("()") else frozenset({Meaning(value)})
        if isinstance(value, Imported):
            return self._imported(value.name)
        return frozenset() if value is None else self.meanings(value, binding.scope)

    def _imported(self, name: str) -> Meanings:
        module, _, last = name.rpartition(".")
        if module in self.code.modules and name not in self.code.modules:
            return self._member(module, last)
        return frozenset({Meaning(name)})

    def _pass(self, callee: Meaning, site: Site) -> None:
        """Bind a call's arguments to the parameters or fields that take them."""
        node, key = site.node, (callee.name, site.node)
        if key in self.passed or callee.partial or callee.name.startswith("builtins."):
            return
        self.passed.add(key)
        plain = list(takewhile(lambda own: not isinstance(own, ast.Starred), node.args))
        named = [(own.arg, own.value) for own in node.keywords if own.arg is not None]
        for takes, bindings in self._takers(callee.name):
            for name, value in [*zip(takes, plain, strict=False), *named]:
                bindings[name].append(Binding(value, site.scope))

    def _takers(self, name: str) -> Iterator[tuple[list[str], dict[str, list[Binding]]]]:
        """The names that take what a call passes by position, and where arguments are bound."""
        makers = self.code.defined.get(f"{name}.__init__") or self.code.defined.get(name)
        if makers is None:  # `replace(state, kernels=…)`, `SimpleNamespace(kernels=…)`
            yield [], self.code.attributes
        for scope in makers or ():
            yield scope.takes, scope.bindings


def _some(name: str) -> str:
    """An object that another library gave: no more than the library matters."""
    return f"{name.partition('.')[0].removesuffix('()')}()"


def _union(parts: Iterable[Meanings]) -> Meanings:
    return frozenset(chain.from_iterable(parts))


def _alternatives(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.value] if isinstance(node, ast.NamedExpr) else []


def _reaching(bindings: list[Binding], position: Position) -> list[Binding]:
    """Those that may hold at a position: the last that holds for sure, and what branches gave since."""
    before = sorted((own for own in bindings if own.start <= position), key=lambda own: own.start)
    sure = [number for number, own in enumerate(before) if own.end >= position]
    return before[sure[-1] if sure else 0 :] or bindings
