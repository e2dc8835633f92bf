"""Attention weights from a DeepSeek-V4 checkpoint: the layers and the rank that are asked for, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from dsv4core.api import (
    CheckpointError,
    ConfigError,
    LayerScales,
    LayerWeights,
    ModelShape,
    Weight,
    WeightError,
)
from dsv4core.model.files import TensorFiles
from dsv4core.model.matching import Match, match_layer, match_scalars, match_tensor
from dsv4core.model.names import EMBEDDING
from dsv4core.model.rope import rope_table
from dsv4core.model.shapes import layer_spec, model_shape, read_config, weight_block
from dsv4core.model.tensors import TensorSpec

_ALWAYS_FP32 = ("attn_sink", "compressor.ape", "indexer.compressor.ape")


class Checkpoint:
    """A checkpoint directory: config.json and safetensors files, single or sharded, memory-mapped.

    Official names, and those that transformers writes, are read alike. Opening reads config.json and the
    index; tensors are read when they are asked for, and nothing else is.

    Attributes:
        directory: Where it lies.
        shape: Sizes and layer kinds from its config.json.
        block: Rows and columns of its FP8 weights that share a scale.
    """

    def __init__(
        self, directory: Path, shape: ModelShape, block: tuple[int, int], files: TensorFiles
    ) -> None:
        self.directory = directory
        self.shape = shape
        self.block = block
        self._files = files

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Open the checkpoint in `directory`.

        Raises:
            CheckpointError: It is not a directory, has no config.json or no safetensors files, or its index
                or a header cannot be read.
            ConfigError: Its config.json cannot be used.
        """
        config = read_config(directory)
        return cls(Path(directory), model_shape(config), weight_block(config), TensorFiles(directory))

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding."""
        return self.shape.vocab_size

    @property
    def _embedding_spec(self) -> TensorSpec:
        return TensorSpec((self.vocab_size, self.shape.hidden_size))

    def verify(self, layers: Iterable[int]) -> None:
        """Check names, shapes and dtypes of the embedding, and of the attention and its norm in `layers`.

        Only headers are read.

        Raises:
            CheckpointError: One line for each tensor that is missing, extra, misshapen or of a wrong dtype,
                and for each file that cannot be read.
        """
        _, faults = match_tensor(self._files, EMBEDDING, self._embedding_spec, self.block)
        for index in layers:
            faults += match_layer(self._files, self.shape, index, self.block)[1]
            faults += match_scalars(self._files, self.shape, index)[1]
        self._report(faults)

    def layer(
        self,
        index: int,
        rank: int = 0,
        tp_size: int = 1,
        *,
        max_positions: int,
        device: torch.device | str = "cpu",
    ) -> LayerWeights:
        """The weights of layer `index`, rank `rank`'s shard of `tp_size`, on `device`.

        Values are as stored, except that sinks and ape become fp32. From `num_hidden_layers` on, layers are
        draft layers.

        Args:
            index: Layer number.
            rank: Tensor-parallel rank.
            tp_size: Ranks that share heads and output groups.
            max_positions: Rows of the RoPE table, which all layers of one RoPE class share.
            device: Where the weights go.

        Raises:
            CheckpointError: As `verify`, for this layer.
            WeightError: A weight or a scale holds NaN or infinity.
            ConfigError: Heads, groups or scale blocks cannot be split like this.
        """
        spec = layer_spec(self.shape, index, rank, tp_size)
        tensors = {}
        for name, match in self._matches(index).items():
            if name != "attn_norm":
                dtype = torch.float32 if name in _ALWAYS_FP32 else None
                tensors[name] = _moved(self._weight(match, rank, tp_size), device, dtype)
        rope = rope_table(self.shape.rope_of(spec.kind), self.shape.qk_rope_head_dim, max_positions, device)
        return LayerWeights(tensors, rope, self._scales(index))

    def attn_norm(self, index: int) -> torch.Tensor:
        """Weight of the RMS norm before layer `index`'s attention: `[hidden_size]`, as stored, on the CPU.

        Raises:
            CheckpointError: As `verify`, for this layer.
            WeightError: It holds NaN or infinity.
        """
        return self._weight(self._matches(index)["attn_norm"], rank=0, tp_size=1).data

    def embedding(self, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """The embeddings of `token_ids`: `[tokens, hidden_size]`, as stored, on the CPU.

        Only the rows of these tokens are read.

        Raises:
            CheckpointError: The embedding is missing, misshapen or of a wrong dtype.
            WeightError: A row holds NaN or infinity.
            ConfigError: A token id is outside the vocabulary.
        """
        tokens = torch.as_tensor(token_ids, dtype=torch.int64, device="cpu")
        for token in tokens.tolist():
            if not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"Token {token} is outside the vocabulary of {self.vocab_size}; tokenise for this model."
                )
        match, problems = match_tensor(self._files, EMBEDDING, self._embedding_spec, self.block)
        self._report(problems)
        assert match is not None
        distinct, position = tokens.unique(return_inverse=True)
        empty = self._files.read(match.data, slice(0, 0), slice(None))
        rows = [self._files.read(match.data, slice(row, row + 1), slice(None)) for row in distinct.tolist()]
        table = torch.cat((empty, *rows))
        _refuse_bad_values(match.data, table)
        return table[position]

    def _scales(self, index: int) -> LayerScales:
        matches, problems = match_scalars(self._files, self.shape, index)
        self._report(problems)
        values = {name: float(self._files.read(stored)) for name, stored in matches.items()}
        try:
            return LayerScales(**values)
        except ValueError as error:
            raise WeightError(
                f"The scales of layer {index}: {error} The checkpoint is damaged; get it again."
            ) from error

    def _matches(self, index: int) -> dict[str, Match]:
        matches, problems = match_layer(self._files, self.shape, index, self.block)
        self._report(problems)
        return matches

    def _report(self, problems: Sequence[str]) -> None:
        lines = list(dict.fromkeys(problems))
        if not lines:
            return
        where = f"The checkpoint in {self.directory} cannot be used:"
        if len(lines) == 1:
            raise CheckpointError(f"{where} {lines[0]}")
        text = "\n  ".join(lines)
        raise CheckpointError(f"{where}\n  {text}")

    def _weight(self, match: Match, rank: int, tp_size: int) -> Weight:
        """One rank's part of a tensor, on the CPU, its values checked."""
        part = _share(match.spec, (1, 1), rank, tp_size)
        if match.scale is None:
            return Weight(self._values(match.data, part))
        _refuse_cut_blocks(match, self.block, tp_size)
        blocks = _share(match.spec, self.block, rank, tp_size)
        return Weight(self._values(match.data, part), self._values(match.scale, blocks), self.block)

    def _values(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        values = self._files.read(name, *part)
        _refuse_bad_values(name, values)
        return values


def _share(spec: TensorSpec, block: tuple[int, int], rank: int, tp_size: int) -> tuple[slice, ...]:
    """The part of a tensor, counted in blocks, that belongs to a rank."""
    part = [slice(None)] * len(spec.shape)
    if spec.split is not None:
        share = spec.shape[spec.split] // tp_size
        step = block[spec.split]
        part[spec.split] = slice(rank * share // step, -(-(rank + 1) * share // step))
    return tuple(part)


def _refuse_cut_blocks(match: Match, block: tuple[int, int], tp_size: int) -> None:
    split = match.spec.split
    if split is None or tp_size == 1:
        return
    share = match.spec.shape[split] // tp_size
    if share % block[split]:
        raise ConfigError(
            f"A tensor-parallel size of {tp_size} gives each rank {share} {('rows', 'columns')[split]} of "
            f"{match.data}, which cuts its scale blocks of {block[split]}; use fewer ranks."
        )


def _moved(weight: Weight, device: torch.device | str, dtype: torch.dtype | None) -> Weight:
    scale = None if weight.scale is None else weight.scale.to(device)
    return Weight(weight.data.to(device=device, dtype=dtype), scale, weight.block)


def _refuse_bad_values(name: str, values: torch.Tensor) -> None:
    if values.dtype == torch.float8_e8m0fnu:
        bad = values.view(torch.uint8) == 0xFF
    elif values.dtype == torch.float8_e4m3fn:
        bad = (values.view(torch.uint8) & 0x7F) == 0x7F
    else:
        bad = ~values.isfinite()
    if count := int(bad.sum()):
        raise WeightError(
            f"{name} holds {count} NaN or infinite values; the checkpoint is damaged, so get it again."
        )
