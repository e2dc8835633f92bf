"""Takes a command's words apart: its own options, and overrides, which are Hydra's affair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dsv4core.api import ConfigError

HELP = ("--help", "-h")
ADVICE = {
    "--prompt": "or prompt=@FILE to read it from a file",
    "--out": "the file that is written",
    "--only": "a part of the names of checks",
    "--deadline": "the seconds that a check may take",
}


@dataclass(frozen=True)
class Arguments:
    """A command's arguments.

    Attributes:
        overrides: Words that are no options; `json=true` for `--json`.
        options: Options with their texts, which are never Hydra's; flags have none.
    """

    overrides: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Accepted:
    """The options of a command, besides `--json` and `--help`.

    Attributes:
        texts: Those that are followed by a text.
        flags: Those that are not.
    """

    texts: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{', '.join([*(f'{name} TEXT' for name in self.texts), *self.flags, '--json'])} and --help"


def parse(command: str, words: Sequence[str], accepted: Accepted) -> Arguments | None:
    """Take the words after a command apart; None where help is asked for.

    Raises:
        ConfigError: An option is not the command's, lacks its text, or is given twice.
    """
    overrides: list[str] = []
    options: dict[str, str] = {}
    remaining = iter(words)
    for word in remaining:
        option, equals, text = word.partition("=")
        if word in HELP:
            return None
        if option in accepted.texts:
            if option in options:
                raise ConfigError(f"{option} is given more than once; give it once.")
            options[option] = _text(option, text if equals else None, remaining)
        elif word in accepted.flags:
            options[word] = ""
        elif word == "--json":
            overrides.append("json=true")
        elif word.startswith("-"):
            raise ConfigError(f"dsv4 {command} takes no option {word!r}; it takes {accepted}.")
        else:
            overrides.append(word)
    return Arguments(tuple(overrides), options)


def _text(option: str, text: str | None, remaining: Iterator[str]) -> str:
    text = next(remaining, "") if text is None else text
    if not text:
        raise ConfigError(f"{option} has no text; write {option} TEXT, {ADVICE[option]}.")
    return text
