"""The safetensors files of a checkpoint: names, headers, and slices of their tensors."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dsv4core.api import CheckpointError

INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's header describes it: dtype by safetensors' name, and shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class TensorFiles:
    """The tensors of all safetensors files in a directory, by name.

    A file's header is read when one of its tensors is first asked for, and mapped into memory when one is
    first read; so files that nobody needs are never touched, and may be absent where there is an index.
    """

    def __init__(self, directory: str | Path) -> None:
        """Read the index, or the headers where there is none.

        Raises:
            CheckpointError: There are no safetensors files, two of them hold a tensor of one name, or the
                index or a header cannot be read.
        """
        self.directory = Path(directory)
        self._headers: dict[str, dict[str, StoredTensor]] = {}
        self._mapped: dict[str, Any] = {}
        self._file_of = self._read_index()
        self._names = sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> StoredTensor:
        """Describe a tensor that `in` finds.

        Raises:
            CheckpointError: Its file is missing, cut short, or does not hold it.
        """
        file = self._file_of[name]
        header = self._header(file)
        if name not in header:
            raise CheckpointError(
                f"{INDEX} puts {name} into {file}, but it is not there; download both again."
            )
        return header[name]

    def below(self, prefix: str) -> list[str]:
        """Names that start with `prefix`."""
        start, stop = (bisect_left(self._names, bound) for bound in (prefix, prefix + "\U0010ffff"))
        return self._names[start:stop]

    def read(self, name: str, *index: slice) -> torch.Tensor:
        """A contiguous copy, on the CPU, of a tensor or of the part that `index` names; only that is read.

        Args:
            name: A tensor that `in` finds.
            index: A slice for each dimension, or nothing for all of it.

        Raises:
            CheckpointError: Its file is missing, cut short, or does not hold it.
        """
        parts = index or tuple(slice(None) for _ in self[name].shape)
        part: torch.Tensor = self._map(self._file_of[name]).get_slice(name)[parts]
        # A slice is a view of the mapped file, which may change or vanish.
        return part.clone(memory_format=torch.contiguous_format)

    def _read_index(self) -> dict[str, str]:
        path = self.directory / INDEX
        if not path.is_file():
            return self._names_of_headers()
        try:
            file_of = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): str(file) for name, file in file_of.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is no JSON object with a weight_map from tensor to file; download it again."
            ) from error

    def _names_of_headers(self) -> dict[str, str]:
        files = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{self.directory} has no .safetensors files; .bin files are not read, so convert them."
            )
        file_of: dict[str, str] = {}
        for file in files:
            for name in self._header(file):
                if name in file_of:
                    raise CheckpointError(
                        f"{file_of[name]} and {file} in {self.directory} both hold {name}, and no {INDEX} "
                        "chooses between them; keep the files of one checkpoint."
                    )
                file_of[name] = file
        return file_of

    def _header(self, file: str) -> dict[str, StoredTensor]:
        if file not in self._headers:
            self._headers[file] = _read_header(self.directory / file)
        return self._headers[file]

    def _map(self, file: str) -> Any:
        if file not in self._mapped:
            self._header(file)
            try:
                self._mapped[file] = safe_open(self.directory / file, framework="pt", device="cpu")
            except SafetensorError as error:
                raise CheckpointError(f"{self.directory / file} cannot be read ({error}).") from error
        return self._mapped[file]


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file: 8 bytes of header length, a JSON header, then the data."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; download it.")
    found = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if found < _LENGTH_BYTES + length:
            raise CheckpointError(
                f"{path} has {found} bytes, but its header says at least {_LENGTH_BYTES + length}; it is "
                "cut short or no safetensors file (a Git LFS pointer?), so download it again."
            )
        header = file.read(length)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()
        }
        data = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has no readable safetensors header; download it again.") from error
    if found != (expected := _LENGTH_BYTES + length + data):
        raise CheckpointError(
            f"{path} has {found} bytes, but its header says {expected}; the file is cut short or damaged, so "
            "download it again."
        )
    return tensors
