"""What tests of native ops run on."""

from __future__ import annotations

import pytest
import torch

from hotshoe_native.isa import available
from hotshoe_native.library import load
from hotshoe_native.linear import DTYPES
from hotshoe_native.ops import NativeLibrary


@pytest.fixture(params=[isa.name for isa in available()])
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    """One for each instruction set that this CPU has."""
    return load(request.param)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of activations."""
    found: torch.dtype = request.param
    return found
