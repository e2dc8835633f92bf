"""What a platform is asked."""

import torch


class Platform:
    """A CPU."""

    def is_cpu(self):
        """Whether it is one."""
        return True

    @classmethod
    def fp8_dtype(cls):
        """The dtype of FP8 codes."""
        return torch.float8_e4m3fn
