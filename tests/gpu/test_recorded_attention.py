"""Attention in a CUDA graph, replayed for lengths that it wasn't recorded with."""

from __future__ import annotations

import pytest

from gpu import test_kernels
from hotshoe.testing.attention import SPECS
from interpreted.one_batch import cuda_graph, run_on_one_batch


@pytest.mark.parametrize("name", ["gqa-2", "window-33", "sinks", "bfloat16", "bfloat16-on-int8"])
def test_a_recorded_layer_serves_steps_of_other_lengths(name: str) -> None:
    run_on_one_batch(test_kernels.TestTritonAttention().start(SPECS[name]), cuda_graph)
