"""Kernels run in Triton's interpreter where there is no GPU; it has to be chosen before they are defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
