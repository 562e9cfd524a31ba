"""Every test of the compiled kernels runs with each variant that this CPU can run."""

import pytest

from models.errors import KernelError
from models.kernels.loader import active_variant, choose_variant, runnable_variants

try:
    VARIANTS = runnable_variants()
except KernelError:  # no compiler here: test_loader.py tells
    VARIANTS = []


@pytest.fixture(params=VARIANTS)
def variant(request):
    """Switches the kernels to one variant for a test."""
    usual = active_variant()
    choose_variant(request.param)
    yield request.param
    choose_variant(usual)
