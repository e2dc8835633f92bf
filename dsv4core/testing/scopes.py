"""Where a package's source gives names their values, and where it calls: read, without an import."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from dsv4core.testing.source import Source

Position = tuple[float, float]
BEGINNING: Position = (0, 0)
END: Position = (inf, inf)
RETURN = "return"
"""The name to which a function's scope binds what it returns."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Imported:
    """What an import statement names."""

    name: str


Value = ast.expr | Imported | str | None


@dataclass(frozen=True, eq=False)
class Binding:
    """A name is given a value.

    Attributes:
        value: An expression, an import, a definition by its dotted name (with `()`: what a call of it gives),
            or None where reading cannot tell.
        scope: Where the expression stands.
        start: From where on the name has the value.
        end: Where the block ends that gives it: beyond, another branch may have been taken.
    """

    value: Value
    scope: Scope
    start: Position = BEGINNING
    end: Position = BEGINNING


@dataclass(frozen=True, eq=False)
class Scope:
    """A module, a class, a function or a lambda.

    Attributes:
        name: Its dotted name; `wave.layer.Layer.attend` is a method.
        node: Its text.
        outer: What it stands in.
        takes: Parameters by position, without `self`; the fields of a class.
        bindings: By name; those of a class are also its objects' attributes.
    """

    name: str
    node: ast.AST
    outer: Scope | None = None
    takes: list[str] = field(default_factory=list)
    bindings: defaultdict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))

    @property
    def is_class(self) -> bool:
        """Whether it is a class."""
        return isinstance(self.node, ast.ClassDef)


@dataclass(frozen=True, eq=False)
class Site:
    """A call as it stands in a file, with the top-level packages that the file imports."""

    node: ast.Call
    scope: Scope
    place: str
    imported: set[str]


@dataclass(frozen=True)
class Code:
    """What was read.

    Attributes:
        modules: The package's modules by name.
        defined: Its classes and functions by dotted name; branches may define one more than once.
        attributes: Attributes of objects that reading cannot tell, by name.
        sites: All calls.
    """

    modules: dict[str, Scope] = field(default_factory=dict)
    defined: defaultdict[str, list[Scope]] = field(default_factory=lambda: defaultdict(list))
    attributes: defaultdict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))
    sites: list[Site] = field(default_factory=list)

    @property
    def classes(self) -> list[Scope]:
        """The package's classes."""
        return [scope for scopes in self.defined.values() for scope in scopes if scope.is_class]


def read(source: Source) -> Code:
    """Read all files of a package."""
    code = Code()
    for file in source.files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        code.modules[source.module(file)] = module = Scope(source.module(file), tree)
        reader = _Reader(code, module, source.place(file), file.name == "__init__.py")
        for statement in tree.body:
            reader.visit(statement)
    return code


def start_of(node: ast.expr) -> Position:
    """Where an expression begins."""
    return node.lineno, node.col_offset


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`; empty where it is no name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


class _Reader(ast.NodeVisitor):
    """Reads one file."""

    def __init__(self, code: Code, module: Scope, place: str, is_package: bool) -> None:
        self.code, self.module, self.place = code, module, place
        self.parent = module.name if is_package else module.name.rpartition(".")[0]
        self.scope, self.end = module, END
        self.imported: set[str] = set()
        self.globals: set[str] = set()

    def generic_visit(self, node: ast.AST) -> None:
        for _, value in ast.iter_fields(node):
            items = value if isinstance(value, list) else [value]
            with self._until(_end(items[-1]) if items and isinstance(items[0], ast.stmt) else self.end):
                for item in items:
                    if isinstance(item, ast.AST):
                        self.visit(item)

    def visit_Import(self, node: ast.Import) -> None:
        for own in node.names:
            library = own.name.partition(".")[0]
            self.imported.add(library)
            self._bind(own.asname or library, Imported(own.name if own.asname else library), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            parts = self.parent.split(".")
            module = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [module])])
        else:
            self.imported.add(module.partition(".")[0])
        for own in node.names:
            self._bind(own.asname or own.name, Imported(f"{module}.{own.name}"), node)

    def visit_Global(self, node: ast.Global) -> None:
        self.globals |= {*node.names}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._store(target, node.value, node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        self._store(node.target, node.value, node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._store(node.target, node.value, node)

    def visit_Name(self, node: ast.Name) -> None:
        """Targets of loops and the like."""
        if isinstance(node.ctx, ast.Store):
            self._bind(node.id, None, node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        with self._until(BEGINNING):  # its names are its own
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        self.scope.bindings[RETURN].append(Binding(node.value, self.scope))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.code.sites.append(Site(node, self.scope, f"{self.place}:{node.lineno}", self.imported))
        self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        with self._inside(Scope(f"{self.scope.name}.<lambda>", node, self.scope)):
            self._take(node.args)
            self.visit(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        scope = self._define(node)
        for own in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(own)
        fields = [own.target for own in node.body if isinstance(own, ast.AnnAssign)]
        scope.takes.extend(own.id for own in fields if isinstance(own, ast.Name))
        with self._inside(scope):
            for statement in node.body:
                self.visit(statement)

    def visit_FunctionDef(self, node: Function) -> None:
        decorators = {last_name(own) for own in node.decorator_list}
        scope = self._define(node, "()" if decorators & {"property", "cached_property"} else "")
        for own in (*node.decorator_list, node.args):
            self.visit(own)
        with self._inside(scope):
            self._take(node.args)
            if self._in_class and "staticmethod" not in decorators:
                self._take_owner("" if "classmethod" in decorators else "()")
            for statement in node.body:
                self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    @property
    def _in_class(self) -> bool:
        return self.scope.outer is not None and self.scope.outer.is_class

    def _define(self, node: Function | ast.ClassDef, suffix: str = "") -> Scope:
        scope = Scope(f"{self.scope.name}.{node.name}", node, self.scope)
        self.code.defined[scope.name].append(scope)
        self._bind(node.name, scope.name + suffix, node)
        return scope

    def _take(self, arguments: ast.arguments) -> None:
        """Bind the parameters of the scope to their defaults."""
        plain = [*arguments.posonlyargs, *arguments.args]
        self.scope.takes.extend(own.arg for own in plain)
        due: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
        values = [*due, *arguments.defaults, *arguments.kw_defaults, None, None]
        for own, value in zip(
            [*plain, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg], values, strict=True
        ):
            if own is not None:
                self.scope.bindings[own.arg].append(Binding(value, self.scope.outer or self.scope))

    def _take_owner(self, suffix: str) -> None:
        """Bind `self` or `cls`."""
        scope = self.scope
        for name in scope.takes[:1]:
            assert scope.outer is not None
            scope.bindings[name] = [Binding(scope.outer.name + suffix, scope)]
        del scope.takes[:1]

    def _store(self, target: ast.expr, value: ast.expr | None, node: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, value, node)
        elif isinstance(target, ast.Attribute):
            self.visit(target.value)
            self._attributes(target.value)[target.attr].append(Binding(value, self.scope))
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            for own, part in zip(target.elts, value.elts, strict=False):
                self._store(own, part, node)
        else:
            self.visit(target)

    def _attributes(self, owner: ast.expr) -> defaultdict[str, list[Binding]]:
        """Where an attribute of an object is kept: with the class for `self`."""
        outer = self.scope.outer
        if isinstance(owner, ast.Name) and outer is not None and outer.is_class:
            values = [own.value for own in self.scope.bindings.get(owner.id, ())]
            if values in ([outer.name], [f"{outer.name}()"]):
                return outer.bindings
        return self.code.attributes

    def _bind(self, name: str, value: Value, node: ast.AST) -> None:
        if name in self.globals:
            self.module.bindings[name].append(Binding(value, self.scope, _end(node)))
        else:
            self.scope.bindings[name].append(Binding(value, self.scope, _end(node), self.end))

    @contextmanager
    def _until(self, end: Position) -> Iterator[None]:
        """What is bound here holds for sure up to there."""
        before, self.end = self.end, end
        yield
        self.end = before

    @contextmanager
    def _inside(self, scope: Scope) -> Iterator[None]:
        before, self.scope = self.scope, scope
        with self._until(END):
            yield
        self.scope = before


def _end(node: ast.AST) -> Position:
    assert isinstance(node, ast.stmt | ast.expr)
    return node.end_lineno or inf, node.end_col_offset or inf
