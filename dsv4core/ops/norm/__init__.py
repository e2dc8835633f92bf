"""RMS norms."""

from dsv4core.ops.norm.reference import latent_norms, rms_norm

__all__ = ["latent_norms", "rms_norm"]
