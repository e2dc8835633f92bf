"""Loads one backend: imports it, checks it against the contract, and isolates whatever goes wrong."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, TypeVar, cast

import pluggy

from dsv4core import __version__
from dsv4core.api import SUPPORTED_API, BackendInfo, BackendOptions, PluginError, Reason, hookspecs
from dsv4core.framework.discovery import GROUP, BackendRecord
from dsv4core.framework.switches import strict
from dsv4core.framework.watchdog import watch
from dsv4core.framework.wording import add_note, near_miss, with_origin

T = TypeVar("T")

DEFECTS = frozenset({"broken", "api", "conflict", "probe-error"})
"""Codes of reasons that lie in a package, not in the request: passing over one is worth a warning."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A loaded backend.

    Attributes:
        record: What its distribution declares.
        info: Its description of itself.
        manager: A plugin manager of its own: it holds the backend and wrappers of its hooks, so that no hook
            ever reaches another backend.
        plugin: The module or object with the hook implementations.
    """

    record: BackendRecord
    info: BackendInfo
    manager: pluggy.PluginManager
    plugin: object

    @property
    def name(self) -> str:
        """Its name in configs and commands."""
        return self.record.name

    def implements(self, hook: str) -> bool:
        """Whether the backend itself, not a wrapper, implements `hook`."""
        return self.implementation(hook) is not None

    def implementation(self, hook: str) -> pluggy.HookImpl | None:
        """The backend's own implementation of `hook`, or None."""
        for candidate in getattr(self.manager.hook, hook).get_hookimpls():
            if candidate.plugin is self.plugin and not (candidate.wrapper or candidate.hookwrapper):
                return cast(pluggy.HookImpl, candidate)
        return None


def load_backend(record: BackendRecord) -> Backend:
    """Import a backend and check it against the contract.

    Raises:
        PluginError: It is disabled or in conflict, it was made for another core, its import raised, or it
            breaks the contract. With `DSV4_STRICT=1` an exception of its own comes through as it is.
    """
    if record.problem is not None:
        raise PluginError(record.problem)
    _check_core(record)
    with (
        watch(f"Importing backend {record.name!r} of {record.source}", record.name),
        isolated(record, "broken", f"{record.title} cannot be loaded:"),
    ):
        return _check(record, EntryPoint(record.name, record.value, GROUP).load())


@contextmanager
def isolated(record: BackendRecord, code: str, sentence: str) -> Iterator[None]:
    """Make a `PluginError` of whatever a backend raises; with `DSV4_STRICT=1` let it through with a note.

    Args:
        record: The backend.
        code: The reason's code.
        sentence: The beginning of the reason's text, which the exception ends.
    """
    try:
        yield
    except (PluginError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # extension modules raise some that are no Exception
        # An exit is never the plugin's to decide, and would show no traceback.
        if strict() and not isinstance(error, SystemExit):
            add_note(f"backend {record.name!r} of {record.source} ({record.value})", error)
            raise
        fix = "DSV4_STRICT=1 shows the traceback."
        fix = f"{_repair(record)}; {fix}" if code == "broken" else fix
        raise PluginError(Reason(code, f"{sentence} {with_origin(error, record.package)}.", fix)) from error


def answer(backend: Backend, hook: str, expected: type[T], **arguments: Any) -> T:
    """Call a hook that is not hot and check that its value is of the type that is due.

    Raises:
        PluginError: The value is None or of another type.
    """
    value = getattr(backend.manager.hook, hook)(**arguments)
    if value is None or not isinstance(value, expected):
        due = "a value" if expected is object else expected.__name__
        raise broken(backend.record, f"returned {_kind(value)} from {hook}, where {due} is due")
    return value


def tolerable(error: PluginError) -> bool:
    """Whether others may go on without this backend; with `DSV4_STRICT=1` a defect is never passed over."""
    return not strict() or error.reason.code not in DEFECTS


def broken(record: BackendRecord, what: str) -> PluginError:
    """The error for a backend that breaks the contract; `what` ends the sentence that its name begins."""
    return PluginError(Reason("broken", f"{record.title} {what}.", f"{_repair(record)}."))


def _repair(record: BackendRecord) -> str:
    return f"Repair or uninstall {record.distribution}"


def _check_core(record: BackendRecord) -> None:
    """Before the import, which would fail for reasons that say less."""
    if not record.core:
        return
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(record.core).contains(__version__, prereleases=True):
        text = f"{record.title} needs dsv4core{record.core}, and this is dsv4core {__version__}."
        raise PluginError(Reason("api", text, _fitting(record)))


def _check(record: BackendRecord, plugin: object) -> Backend:
    if inspect.isclass(plugin):
        raise broken(
            record, f"is the class {plugin.__name__}; let its entry point name an instance or a module"
        )
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
    manager.register(plugin, record.name)
    info = info or manager.hook.dsv4_backend_info()
    if not isinstance(info, BackendInfo):
        raise broken(record, f"returned {_kind(info)} from dsv4_backend_info, where BackendInfo is due")
    _check_api(record, info)
    _check_options(record, info.options)
    return Backend(record, info, manager, plugin)


def _check_api(record: BackendRecord, info: BackendInfo) -> None:
    if info.api in SUPPORTED_API:
        return
    supported = ", ".join(map(str, sorted(SUPPORTED_API)))
    text = (
        f"{record.title} was written for version {info.api} of the contract, and dsv4core {__version__} "
        f"serves {supported}."
    )
    raise PluginError(Reason("api", text, _fitting(record)))


def _fitting(record: BackendRecord) -> str:
    """What to install where a backend and this core do not fit."""
    own = f"`pip install 'dsv4core{record.core}'`" if record.core else "another version of dsv4core"
    return f"Install a version of {record.distribution} that fits, or {own}."


def _check_options(record: BackendRecord, options: type[BackendOptions]) -> None:
    if not (isinstance(options, type) and issubclass(options, BackendOptions)):
        raise broken(record, f"has options of {options!r}, which is no subclass of BackendOptions")
    if "__dataclass_fields__" not in vars(options):
        # Without the decorator its annotations are no fields, and the options would be silently lost.
        raise broken(record, f"has options of {options.__name__}, which is not decorated with @dataclass")
    name = options(name=record.name).name
    if name != record.name:
        raise broken(record, f"has options that change their name to {name!r}")


def _hook_faults(manager: pluggy.PluginManager, plugin: object) -> list[str]:
    """What is wrong with a plugin's hook functions; pluggy finds neither unmarked nor missing ones."""
    specs = {name: caller.spec.argnames for name, caller in vars(manager.hook).items()}
    faults = []
    missing = set(hookspecs.MANDATORY)
    for name in dir(plugin):
        marks = manager.parse_hookimpl_opts(plugin, name)
        if marks is None:
            own = getattr(plugin, name)
            if name.startswith("dsv4_") and callable(own):
                what = "not marked with @hookimpl" if inspect.isroutine(own) else "no plain function"
                faults.append(f"{name} is {what}")
                missing.discard(name)
            continue
        hook = marks["specname"] or name
        if hook not in specs:
            near = near_miss(hook, specs)
            faults.append(f"{hook} is no hook" + (f" (did you mean {near}?)" if near else ""))
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
