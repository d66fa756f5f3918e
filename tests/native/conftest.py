"""What tests of native ops run on."""

from __future__ import annotations

import pytest
import torch

from hotshoe_native.isa import available
from hotshoe_native.library import load
from hotshoe_native.linear import DTYPES
from hotshoe_native.ops import NativeLibrary


@pytest.fixture(params=[isa.name for isa in available()])
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set that this CPU has."""
    return str(request.param)


@pytest.fixture
def library(isa: str) -> NativeLibrary:
    """One for each instruction set."""
    return load(isa)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of activations."""
    found: torch.dtype = request.param
    return found
