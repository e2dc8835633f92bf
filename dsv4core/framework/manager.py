"""Loads one backend: imports it, checks it against the contract, and isolates whatever goes wrong."""

from __future__ import annotations

import difflib
import inspect
import os
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, TypeVar, cast

import pluggy

from dsv4core.api import SUPPORTED_API, BackendInfo, BackendOptions, PluginError, Reason, hookspecs
from dsv4core.framework.discovery import GROUP, BackendRecord

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backend:
    """A loaded backend.

    Attributes:
        name: Its name in configs and commands.
        distribution: The distribution it comes from.
        version: That distribution's version.
        info: Its description of itself.
        manager: A plugin manager of its own: it holds the backend and wrappers of its hooks, so that no hook
            ever reaches another backend.
        plugin: The module or object with the hook implementations.
    """

    name: str
    distribution: str
    version: str
    info: BackendInfo
    manager: pluggy.PluginManager
    plugin: object

    def implements(self, hook: str) -> bool:
        """Whether the backend itself, not a wrapper, implements `hook`."""
        return self.implementation(hook) is not None

    def implementation(self, hook: str) -> pluggy.HookImpl | None:
        """The backend's own implementation of `hook`, or None."""
        for candidate in getattr(self.manager.hook, hook).get_hookimpls():
            if candidate.plugin is self.plugin and not (candidate.wrapper or candidate.hookwrapper):
                return cast(pluggy.HookImpl, candidate)
        return None


class UnusableBackend(PluginError):
    """A backend that cannot be loaded or answers wrongly; `reason` says why and what to do."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def strict() -> bool:
    """Whether `DSV4_STRICT=1` asks for original exceptions instead of isolated ones."""
    return os.environ.get("DSV4_STRICT", "0") not in ("", "0")


def one_line(error: BaseException) -> str:
    """An exception as `Type: text` on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def load_backend(record: BackendRecord) -> Backend:
    """Import a backend and check it against the contract.

    Raises:
        UnusableBackend: It is disabled or in conflict, its import raised, or it breaks the contract. With
            `DSV4_STRICT=1` an exception of its own comes through as it is.
    """
    if record.problem is not None:
        raise UnusableBackend(record.problem)
    try:
        plugin = EntryPoint(record.name, record.value, GROUP).load()
        return _check(record, plugin)
    except UnusableBackend:
        raise
    except (Exception, SystemExit) as error:
        if strict():
            raise
        raise broken(record, f"cannot be loaded: {one_line(error)}") from error


def answer(backend: Backend, hook: str, expected: type[T], **arguments: Any) -> T:
    """Call a hook that is not hot and check that its value is of the type that is due.

    Raises:
        UnusableBackend: The value is None or of another type.
    """
    value = getattr(backend.manager.hook, hook)(**arguments)
    if value is None or not isinstance(value, expected):
        due = "a value" if expected is object else expected.__name__
        raise broken(backend, f"returned {_kind(value)} from {hook}, where {due} is due")
    return value


def broken(backend: Backend | BackendRecord, what: str) -> UnusableBackend:
    """The error for a backend that breaks the contract; `what` ends the sentence that its name begins."""
    fix = f"Repair or uninstall {backend.distribution}; DSV4_STRICT=1 shows the traceback."
    return UnusableBackend(Reason("broken", f"{_title(backend)} {what}.", fix))


def _check(record: BackendRecord, plugin: object) -> Backend:
    describe = getattr(plugin, "dsv4_backend_info", None)
    info = describe() if callable(describe) else None
    if isinstance(info, BackendInfo):
        # Before the hooks: those of another version of the contract may well differ.
        _check_api(record, info)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    faults = _hook_faults(manager, plugin)
    if faults:
        raise broken(record, f"does not follow the contract: {'; '.join(faults)}")
    if not isinstance(info, BackendInfo):
        raise broken(record, f"returned {_kind(info)} from dsv4_backend_info, where BackendInfo is due")
    _check_options(record, info.options)
    manager.register(plugin, record.name)
    return Backend(record.name, record.distribution, record.version, info, manager, plugin)


def _check_api(record: BackendRecord, info: BackendInfo) -> None:
    if info.api in SUPPORTED_API:
        return
    supported = ", ".join(map(str, sorted(SUPPORTED_API)))
    raise UnusableBackend(
        Reason(
            "api",
            f"{_title(record)} was written for version {info.api} of the contract, and this dsv4core "
            f"serves {supported}.",
            f"Install versions of dsv4core and {record.distribution} that fit each other.",
        )
    )


def _check_options(record: BackendRecord, options: type[BackendOptions]) -> None:
    if not (isinstance(options, type) and issubclass(options, BackendOptions)):
        raise broken(record, f"has options of {options!r}, which is no subclass of BackendOptions")
    if "__dataclass_fields__" not in vars(options):
        # Without the decorator its annotations are no fields, and the options would be silently lost.
        raise broken(record, f"has options of {options.__name__}, which is not decorated with @dataclass")
    options(name=record.name)


def _hook_faults(manager: pluggy.PluginManager, plugin: object) -> list[str]:
    """What is wrong with a plugin's hook functions; pluggy finds neither unmarked nor missing ones."""
    specs = {name: caller.spec.argnames for name, caller in vars(manager.hook).items()}
    faults = []
    missing = set(hookspecs.MANDATORY)
    for name in dir(plugin):
        marks = manager.parse_hookimpl_opts(plugin, name)
        if marks is None:
            if name.startswith("dsv4_") and inspect.isroutine(getattr(plugin, name)):
                faults.append(f"{name} is not marked with @hookimpl")
                missing.discard(name)
            continue
        hook = marks["specname"] or name
        if hook not in specs:
            near = difflib.get_close_matches(hook, specs, n=1)
            faults.append(f"{hook} is no hook" + (f" (did you mean {near[0]}?)" if near else ""))
            continue
        faults += _argument_faults(name, getattr(plugin, name), specs[hook])
        if not (marks["wrapper"] or marks["hookwrapper"]):
            missing.discard(hook)
    if missing:
        faults.append(f"it does not implement {', '.join(sorted(missing))}")
    return faults


def _argument_faults(name: str, function: Any, known: tuple[str, ...]) -> list[str]:
    """Arguments that would never be passed: unknown ones, and those that pluggy takes for optional."""
    faults = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in known:
            faults.append(f"{name} takes {parameter}, but its arguments are {', '.join(known) or 'none'}")
        elif (
            parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.default is not parameter.empty
        ):
            faults.append(f"{name} takes {parameter.name} as an optional argument, and so would never get it")
    return faults


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _title(backend: Backend | BackendRecord) -> str:
    return f"Backend {backend.name!r} of {backend.distribution} {backend.version}".rstrip()
