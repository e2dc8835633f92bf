"""The files of a backend's package."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dsv4core.api import DSV4Error

FILE = "signatures.json"


@dataclass(frozen=True)
class Source:
    """The source of a package, or of a single module.

    Attributes:
        package: Its name.
        path: Its folder, or the module's file.
    """

    package: str
    path: Path

    @property
    def signatures(self) -> Path:
        """The file of recorded signatures: in the folder, or beside the module."""
        if self.path.is_dir():
            return self.path / FILE
        return self.path.with_name(f"{self.package.rpartition('.')[2]}.{FILE}")

    @property
    def files(self) -> list[Path]:
        """All files of it; none where it is compiled."""
        if self.path.is_dir():
            return sorted(self.path.rglob("*.py"))
        return [self.path] if self.path.suffix == ".py" else []

    def place(self, file: Path) -> str:
        """How sentences name a file of it."""
        return str(file.relative_to(self.path)) if self.path.is_dir() else file.name

    def module(self, file: Path) -> str:
        """The name under which a file of it is imported."""
        if file == self.path:
            return self.package
        inner = file.relative_to(self.path).with_suffix("").parts
        return ".".join([self.package, *(part for part in inner if part != "__init__")])


def source_of(package: str) -> Source:
    """Where a package's source lies. Nothing is imported but its parents.

    Raises:
        DSV4Error: There is no such package.
    """
    spec = find_spec(package)
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin]
    if not places or places[0] is None:
        raise DSV4Error(f"No package is named {package!r}; name the backend's import package.")
    return Source(package, Path(places[0]))
