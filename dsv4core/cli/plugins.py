"""`dsv4 plugins`: which backends there are, installed or known, and what is wrong with those that fail."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.table import Table

from dsv4core.api import PluginError
from dsv4core.cli.output import show, show_json
from dsv4core.framework.discovery import BackendRecord, discover
from dsv4core.framework.known import KNOWN_BACKENDS
from dsv4core.framework.manager import load_backend, tolerable
from dsv4core.framework.requirements import requirement_reasons


@dataclass(frozen=True)
class Row:
    """One backend as `dsv4 plugins` lists it.

    Attributes:
        name: Its name.
        status: `ok`, `absent`, or the code of the reason why it cannot be loaded or what it needs is missing.
        dist: The distribution it comes from.
        version: The installed version, or None.
        summary: One line about it, or what is wrong with it.
        fix: What to do about it, or None.
    """

    name: str
    status: str
    dist: str
    version: str | None
    summary: str
    fix: str | None


def inventory() -> list[Row]:
    """All installed backends, then those that are known but not installed. Loads them, but not torch."""
    records = discover()
    absent = [
        Row(name, "absent", known.distribution, None, known.summary, known.install)
        for name, known in KNOWN_BACKENDS.items()
        if name not in records
    ]
    return [*map(_row, records.values()), *absent]


def plugins(as_json: bool) -> int:
    """Print the list of backends; the result is the exit code."""
    rows = inventory()
    if as_json:
        show_json([asdict(row) for row in rows])
        return 0
    table = Table("name", "status", box=None, padding=(0, 2, 0, 0))
    table.add_column("about", overflow="fold")
    for row in rows:
        about = row.fix or f"{row.dist} {row.version}"
        table.add_row(row.name, row.status, f"{row.summary}\n{about}")
    show(table)
    return 0


def _row(record: BackendRecord) -> Row:
    try:
        info = load_backend(record).info
        reason = next(iter(requirement_reasons(info.requirements)), None)
    except PluginError as error:
        if not tolerable(error):
            raise
        reason = error.reason
    if reason is not None:
        return Row(record.name, reason.code, record.distribution, record.version, reason.text, reason.fix)
    return Row(record.name, "ok", record.distribution, record.version, info.summary, None)
