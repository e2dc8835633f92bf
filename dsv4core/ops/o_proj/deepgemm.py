"""The output projection with DeepGEMM's grouped FP8 product: heads are rotated back and quantised at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4core.api.errors import ConfigError
from dsv4core.api.layer import Weight
from dsv4core.model.blocks import has_power_of_two_blocks
from dsv4core.ops.inverse_rope_quant.triton import inverse_rope_quant
from dsv4core.ops.linear.triton import linear, prepare_linear

BLOCK = 128
"""Rows and columns of a weight that share a scale, and values of a row of activations."""


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """`wo_a` as DeepGEMM takes it.

    Attributes:
        data: `[groups, o_lora_rank, heads / groups * head_dim]` e4m3.
        scale: On sm_90 `[groups, o_lora_rank / 128, columns / 128]` fp32; on sm_100 one of each row and 128
            columns, four E8M0 packed in an int32.
        recipe: Rows and columns that share a scale: of activations rows, of the weight rows, columns of both.
    """

    data: torch.Tensor
    scale: torch.Tensor
    recipe: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale."""
        return self.data.nbytes + self.scale.nbytes


def prepare_wo_a(weight: Weight, groups: int) -> GroupedWeight:
    """Bring `wo_a` into the form of this GPU: its FP8 data as they are.

    Args:
        weight: `[groups * o_lora_rank, columns]` e4m3, in blocks of 128 x 128.
        groups: Output groups of this rank.

    Raises:
        ConfigError: It is not FP8 in such blocks, a group is no whole number of them, or a scale is no power
            of two.
    """
    rows, columns = weight.data.shape
    if weight.scale is None or not has_power_of_two_blocks(weight, groups, BLOCK):
        raise ConfigError(
            f"wo_a of {rows} x {columns} {weight.data.dtype} in blocks of {weight.block} was given for "
            f"{groups} groups, and DeepGEMM multiplies float8_e4m3fn in whole blocks of {BLOCK} x {BLOCK}, "
            "scaled by powers of two; multiply it with the core's kernels."
        )
    data = weight.data.contiguous().view(groups, rows // groups, columns)
    scale = weight.scale.float().view(groups, rows // groups // BLOCK, columns // BLOCK).contiguous()
    if not _packs_scales(data.device):
        return GroupedWeight(data, scale, (1, BLOCK, BLOCK))
    return GroupedWeight(data, _packed(scale.repeat_interleave(BLOCK, dim=1)), (1, 1, BLOCK))


def o_proj(
    attention: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    wo_a: GroupedWeight,
    wo_b: Weight,
    groups: int,
    shares: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the definition, with FP8 activations in the first product.

    Args:
        attention: `[tokens, heads, head_dim]` bf16, unpadded.
        positions: `[tokens]` int64.
        rope: `[max_positions, rope_dim]` fp32.
        wo_a: From `prepare_wo_a`.
        wo_b: From the kernels' `prepare_linear`.
        groups: Output groups of this rank.
        shares: `[tokens, heads]` fp32 that heads are multiplied with first, or None.

    Returns:
        `[tokens, hidden_size]` bf16: this rank's partial sum.
    """
    import deep_gemm

    tokens = attention.shape[0]
    _, rank, columns = wo_a.data.shape
    low_rank = torch.empty(tokens, groups, rank, dtype=attention.dtype, device=attention.device)
    if tokens:
        codes, scale = inverse_rope_quant(attention, positions, rope, shares)
        codes, scale = codes.view(tokens, groups, columns), scale.view(tokens, groups, columns // BLOCK)
        if wo_a.recipe[1] == 1:  # by groups, whose tokens lie side by side
            scale = _packed(scale.transpose(0, 1).contiguous()).transpose(0, 1)
        rows, weight = (codes, scale), (wo_a.data, wo_a.scale)
        deep_gemm.fp8_einsum("bhr,hdr->bhd", rows, weight, low_rank, recipe=wo_a.recipe)
    return linear(low_rank.flatten(1), wo_b)


def _packs_scales(device: torch.device) -> bool:
    """Whether the GPU's matrix units take E8M0 scales: Blackwell's."""
    return torch.cuda.get_device_capability(device)[0] == 10


def _packed(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two `[…, rows, n]` fp32 as E8M0, four in an int32, as sm_100's kernels load them."""
    import deep_gemm

    packed: torch.Tensor = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(scale)
    return packed


__all__ = ["GroupedWeight", "o_proj", "prepare_linear", "prepare_wo_a"]
