"""Linear and embedding layers: one weight for both, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from hotshoe.api import Kernels, KernelsContext, QuantizationContext
from hotshoe.api.layers import LayerFactory
from hotshoe.errors import ModelLoadError
from hotshoe.testing.forward import DenseTensor
from hotshoe_kernels import torch as torch_kernels
from hotshoe_quantization import none

CPU = torch.device("cpu")


@pytest.fixture
def layers() -> LayerFactory:
    dtype = torch.float32
    kernels = torch_kernels.hotshoe_component()
    quantization = none.hotshoe_component()
    built = kernels.factory(kernels.options(), KernelsContext(device=CPU, dtype=dtype))
    assert isinstance(built, Kernels)
    return LayerFactory(
        kernels=built,
        quantization=quantization.factory(  # type: ignore[arg-type]  # the factory's type is object
            quantization.options(), QuantizationContext(device=CPU, dtype=dtype)
        ),
        dtype=dtype,
        kv_dtype=dtype,
        device=CPU,
    )


def test_embedding_returns_rows_of_its_table(layers: LayerFactory) -> None:
    embedding = layers.embedding("embed", 7, 5)
    table = torch.randn(7, 5)
    embedding.load(DenseTensor("t", table))
    layers.finalize()
    assert torch.equal(embedding(torch.tensor([6, 0, 6])), table[[6, 0, 6]])


def test_tied_head_and_embedding_have_the_very_same_weight(layers: LayerFactory) -> None:
    head = layers.linear("head", 5, 7)  # made, and finished, before the embedding
    embedding = layers.embedding("embed", 7, 5)
    head.tie(embedding)
    table = torch.randn(7, 5)
    embedding.load(DenseTensor("t", table))
    layers.finalize()
    assert head.weight is embedding.weight
    assert torch.equal(head(torch.eye(5)), table.T)


@pytest.mark.parametrize(("in_features", "has_bias"), [(6, False), (5, True)])
def test_head_that_does_not_fit_the_embedding_is_not_tied(
    layers: LayerFactory, in_features: int, has_bias: bool
) -> None:
    head = layers.linear("head", in_features, 7, has_bias=has_bias)
    with pytest.raises(ModelLoadError, match=r"'head' \(7 x .*can't be tied to 'embed' \(7 x 5\)"):
        head.tie(layers.embedding("embed", 7, 5))


def test_embedding_without_a_table_is_named(layers: LayerFactory) -> None:
    embedding = layers.embedding("embed", 7, 5)
    with pytest.raises(ModelLoadError, match="the weight of 'embed' is not loaded"):
        _ = embedding.weight
    with pytest.raises(ModelLoadError, match=r"no weight for \['weight'\] of 'embed'"):
        layers.finalize()


def test_table_that_comes_twice_is_refused(layers: LayerFactory) -> None:
    embedding = layers.embedding("embed", 7, 5)
    table = DenseTensor("second", torch.randn(7, 5))
    embedding.load(table)
    with pytest.raises(ModelLoadError, match="'second' for 'embed' came twice"):
        embedding.load(table)


def test_biases_may_come_after_the_weights(layers: LayerFactory) -> None:
    linear = layers.linear("proj", 3, {"a": 2, "b": 1}, has_bias=True)
    weight, bias = torch.randn(3, 3), torch.randn(3)
    linear.load("b", DenseTensor("b", weight[2:]))
    linear.load("a", DenseTensor("a", weight[:2]))
    linear.load("a", DenseTensor("a.bias", bias[:2]), is_bias=True)
    with pytest.raises(ModelLoadError, match=r"'proj' is incomplete: .* no bias of 'b'"):
        linear.finalize()
    linear.load("b", DenseTensor("b.bias", bias[2:]), is_bias=True)
    linear.finalize()
    assert torch.allclose(linear(torch.eye(3)), weight.T + bias)
