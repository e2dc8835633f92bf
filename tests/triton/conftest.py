"""Kernels run in Triton's interpreter where there is no GPU; it has to be chosen before they are defined."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """NumPy, in which the interpreter computes, warns of infinities that kernels are meant to make."""
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
