"""Both norms of a layer's projections in one launch: torch takes ten, a sixth of a decode's time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def latent_norms(
    latent: torch.Tensor, kv: torch.Tensor, latent_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the definition."""
    tokens = latent.shape[0]
    outputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (latent, kv))
    if tokens:
        widths = (latent.shape[1], kv.shape[1])
        _normalise[(tokens, 2)](
            *(latent, latent_weight, outputs[0], latent.stride(0), widths[0]),
            *(kv, kv_weight, outputs[1], kv.stride(0), widths[1]),
            eps,
            SIZE=triton.next_power_of_2(max(widths)),
            num_warps=4,
        )
    return outputs[0], outputs[1]


@triton.jit
def _normalise(
    latent,
    latent_weight,
    latent_out,
    latent_stride,
    latent_width,
    kv,
    kv_weight,
    kv_out,
    kv_stride,
    kv_width,
    eps,
    SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _row(latent + token * latent_stride, latent_weight, latent_out, token, latent_width, eps, SIZE)
    else:
        _row(kv + token * kv_stride, kv_weight, kv_out, token, kv_width, eps, SIZE)


@triton.jit
def _row(x, weight, out, token, width, eps, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    values = tl.load(x + place, mask=place < width, other=0.0).to(tl.float32)
    scale = tl.load(weight + place, mask=place < width, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    tl.store(
        out + token * width + place, (values * root * scale).to(out.dtype.element_ty), mask=place < width
    )
