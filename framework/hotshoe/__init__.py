"""hotshoe: an LLM inference and serving engine in which every hot part is a plugin behind a
versioned contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotshoe.api.sampling_params import SamplingParams, StructuredOutputs
    from hotshoe.config import EngineConfig
    from hotshoe.entrypoints.async_llm import AsyncLLM
    from hotshoe.entrypoints.llm import LLM
    from hotshoe.entrypoints.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"

_LAZY = {
    "LLM": "hotshoe.entrypoints.llm",
    "AsyncLLM": "hotshoe.entrypoints.async_llm",
    "EngineConfig": "hotshoe.config",
    "SamplingParams": "hotshoe.api.sampling_params",
    "StructuredOutputs": "hotshoe.api.sampling_params",
    "RequestOutput": "hotshoe.entrypoints.outputs",
    "CompletionOutput": "hotshoe.entrypoints.outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import public names when first used: ``import hotshoe`` itself costs milliseconds."""
    import importlib

    if name not in _LAZY:
        raise AttributeError(f"module 'hotshoe' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
