"""Describes everything that a backend or a host may build on: signatures and public fields, one a line.

    python tests/framework/contract.py > tests/framework/contract.txt

writes the description anew after a change that is meant. `API_VERSION` decides what may change.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

MODULES = (
    "dsv4core.api",
    "dsv4core.kvcache",
    "dsv4core.ops",
    "dsv4core.ops.triton",
    "dsv4core.step",
    "dsv4core.step.gathered",
    "dsv4core.testing.conformance",
    "dsv4core.testing.fakes",
    "dsv4core.testing.signatures",
    "dsv4core.testing.tolerances",
    "dsv4core.config",
    "dsv4core.framework.discovery",
    "dsv4core.framework.manager",
    "dsv4core.framework.selection",
    "dsv4core.framework.binding",
    "dsv4core.hydra",
    "dsv4core.libraries",
    "dsv4core.ops.indexer.prompts",
    "dsv4core.ops.o_proj.prepared",
    "dsv4core.workspace",
)


def describe() -> str:
    """The whole description."""
    return "\n".join([*_hooks(), *_literals(), *(line for name in MODULES for line in _module(name))]) + "\n"


def _hooks() -> Iterator[str]:
    from dsv4core.api import hookspecs

    yield "hooks"
    hooks = [value for name, value in vars(hookspecs).items() if name.startswith("dsv4_")]
    for hook in hooks:  # in the order in which they are called
        kind = "mandatory" if hook.__name__ in hookspecs.MANDATORY else "optional"
        yield f"    {kind} {hook.__name__}{_signature(hook)}"


def _literals() -> Iterator[str]:
    """The closed sets of strings that fields of the contract take."""
    yield "\nliterals"
    for name in ("kvcache", "layer", "model", "selection"):
        for key, value in vars(importlib.import_module(f"dsv4core.api.{name}")).items():
            if get_origin(value) is Literal:
                yield f"    {key} = {' | '.join(map(repr, get_args(value)))}"


def _module(name: str) -> Iterator[str]:
    yield f"\n{name}"
    module = importlib.import_module(name)
    own = [key for key, value in vars(module).items() if _is_own(name, key, value)]
    for public in sorted(getattr(module, "__all__", own)):
        if not public.startswith("_"):
            yield from (f"    {line}" for line in _value(public, getattr(module, public)))


def _is_own(module: str, key: str, value: object) -> bool:
    return getattr(value, "__module__", "") == module or (key.isupper() and key != "TYPE_CHECKING")


def _value(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield from _class(name, value)
    elif inspect.isfunction(value):
        yield f"{name}{_signature(value)}"
    elif isinstance(value, Mapping):
        yield f"{name} has {', '.join(map(str, value))}"
    else:
        brief = len(repr(value)) < 100 and type(value).__repr__ is not object.__repr__
        yield f"{name} = {_shown(value)}" if brief else f"{name}: {type(value).__name__}"


def _class(name: str, value: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    frozen = "frozen " if is_dataclass(value) and value.__dataclass_params__.frozen else ""  # type: ignore[attr-defined]
    yield f"{frozen}class {name}({bases})" if bases else f"{frozen}class {name}"
    if is_dataclass(value):
        yield from (f"    {field.name}: {field.type}{_default(field)}" for field in fields(value))
    for key, member in vars(value).items():
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        if isinstance(member, property):
            yield f"    {key} -> {inspect.signature(member.fget).return_annotation}"  # type: ignore[arg-type]
        elif inspect.isfunction(member) and (not key.startswith("_") or _own_init(value, key)):
            yield f"    {key}{_signature(member)}"


class _Plain(str):
    """A text that is shown without quotes: annotations are texts here."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [
        own
        if own.annotation is own.empty
        else own.replace(
            annotation=_Plain(own.annotation),
            default=own.default if len(repr(own.default)) < 100 else _Plain("..."),
        )
        for own in signature.parameters.values()
    ]
    result = signature.return_annotation
    if result is not signature.empty:
        result = _Plain(result)
    return str(signature.replace(parameters=parameters, return_annotation=result))


def _own_init(value: type, key: str) -> bool:
    return key == "__init__" and not is_dataclass(value)


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f" = {_shown(field.default)}"
    return "" if field.default_factory is MISSING else f" = {field.default_factory.__name__}()"


def _shown(value: object) -> str:
    return f"{{{', '.join(map(repr, sorted(value)))}}}" if isinstance(value, frozenset) else repr(value)


if __name__ == "__main__":
    print(describe(), end="")
