"""The command `dsv4`: takes the arguments apart, runs one command, and turns errors into one line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dsv4core import __version__
from dsv4core.api import ConfigError, DSV4Error, PluginError
from dsv4core.cli.arguments import Accepted, Arguments, parse
from dsv4core.cli.output import results_apart, show_line
from dsv4core.framework.switches import strict
from dsv4core.framework.wording import near_miss


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dsv4`.

    Args:
        argv: The arguments; None is those of the process.

    Returns:
        The exit code: 0; 1 where a verification fails; 2 for the user's mistakes; 130 where interrupted.
    """
    try:
        with _logging_to_stderr(), results_apart():
            return _dispatch(sys.argv[1:] if argv is None else argv)
    except DSV4Error as error:
        if strict() and isinstance(error, PluginError) and error.__cause__ is not None:
            raise
        print(f"dsv4: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch" or strict():
            raise
        print(
            "dsv4: torch is not installed, and this computes; install torch's build for here.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if strict() or getattr(error, "__notes__", None):  # raised in a backend, which the note names
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"dsv4: {where}{error.strerror or error}.", file=sys.stderr)
        return 2


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("--help", "-h"):
        return _help()
    if words[0] == "--version":
        show_line(f"dsv4core {__version__}")
        return 0
    if words[0] in ("-sc", "--shell-completion"):
        return _complete(words[1:])
    command, *rest = words
    if command not in COMMANDS:
        near = near_miss(command, COMMANDS)
        advice = f"did you mean {near!r}?" if near else f"the commands are {', '.join(COMMANDS)}."
        raise ConfigError(f"{command!r} is not a command; {advice}")
    chosen = COMMANDS[command]
    arguments = parse(command, rest, chosen.accepted)
    return _help() if arguments is None else chosen.run(arguments)


def _help() -> int:
    from dsv4core.cli.help import print_help

    print_help()
    return 0


def _complete(words: Sequence[str]) -> int:
    """Speak with a shell as a Hydra application does: print its script, or candidates for `COMP_LINE`."""
    action, _, shell = " ".join(words).partition("=")
    if action == "install":
        from dsv4core.hydra import completion_script

        show_line(completion_script(shell).rstrip("\n"))
    elif action == "query" and shell in ("bash", "zsh", "fish"):
        from dsv4core.cli.completion import complete

        logging.getLogger("dsv4core").setLevel(logging.CRITICAL)  # the shell shows stderr within the line
        line = os.environ.get("COMP_LINE", "dsv4 ").split(" ")
        try:
            candidates = complete([*filter(None, line[1:-1]), line[-1]], tuple(COMMANDS))
        except Exception:  # with DSV4_STRICT=1 a broken plugin raises: not here, at a prompt
            candidates = []
        show_line(("\n" if shell == "fish" else " ").join(candidates))
    else:
        raise ConfigError(f"-sc {' '.join(words)} is not known; write -sc install=bash, zsh or fish.")
    return 0


def _run(arguments: Arguments) -> int:
    from dsv4core.cli.configuration import configuration

    logging.getLogger("dsv4core").setLevel(logging.INFO)  # which backend was chosen, and why
    prompt = arguments.options.get("--prompt")
    if prompt is not None and any(word.startswith("prompt=") for word in arguments.overrides):
        raise ConfigError(
            "The prompt is given more than once; give it once, by --prompt TEXT or prompt=@FILE."
        )
    config = configuration(arguments.overrides)
    if prompt is not None:
        config.prompt = prompt
    from dsv4core.cli.run import run

    return run(config)


def _explain(arguments: Arguments) -> int:
    from dsv4core.cli.explain import explain

    return explain(arguments.overrides)


def _plugins(arguments: Arguments) -> int:
    others = [word for word in arguments.overrides if word != "json=true"]
    if others:
        raise ConfigError(f"dsv4 plugins takes no {others[0]!r}; it takes --json and --help only.")
    from dsv4core.cli.plugins import plugins

    return plugins(as_json=bool(arguments.overrides))


def _check(arguments: Arguments) -> int:
    from dsv4core.cli.check import check

    options = arguments.options
    return check(arguments.overrides, "--quick" in options, options.get("--only"), options.get("--deadline"))


def _new(arguments: Arguments) -> int:
    from dsv4core.cli.new import new

    return new(arguments.overrides)


def _calibrate(arguments: Arguments) -> int:
    from dsv4core.cli.calibrate import calibrate
    from dsv4core.cli.configuration import configuration

    config = configuration(arguments.overrides)
    config.prompt = arguments.options.get("--prompt", config.prompt)
    return calibrate(config, arguments.options.get("--out"))


def _bench(arguments: Arguments) -> int:
    from dsv4core.cli.bench import bench

    return bench(arguments.overrides)


@dataclass(frozen=True)
class Command:
    """What `dsv4 NAME` runs, and the options that it takes."""

    run: Callable[[Arguments], int]
    accepted: Accepted


COMMANDS: Mapping[str, Command] = {
    "run": Command(_run, Accepted(texts=("--prompt",))),
    "explain": Command(_explain, Accepted()),
    "plugins": Command(_plugins, Accepted()),
    "bench": Command(_bench, Accepted()),
    "calibrate": Command(_calibrate, Accepted(texts=("--prompt", "--out"))),
    "new": Command(_new, Accepted()),
    "check": Command(_check, Accepted(texts=("--only", "--deadline"), flags=("--quick",))),
}


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is when a message comes, not when the handler was made."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"dsv4: {self.format(record)}", file=sys.stderr)


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """Show dsv4core's own log without touching other loggers: warnings, unless a command wants more."""
    logger, handler = logging.getLogger("dsv4core"), _StderrHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
