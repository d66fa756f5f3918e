"""One frozen ``EngineConfig``, built once from file < environment < command line < arguments.

Importing this imports no torch and no plugin.
"""

from hotshoe.config.load import ResolvedConfig, load_config, normalize_arguments
from hotshoe.config.schema import (
    AttentionConfig,
    CacheConfig,
    EngineConfig,
    EvictionConfig,
    ExecutorConfig,
    GuidedDecodingConfig,
    KernelsConfig,
    LogitsProcessorConfig,
    ModelConfig,
    PluginsConfig,
    QuantizationConfig,
    SamplerConfig,
    SchedulerConfig,
    SpecDecodeConfig,
)

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "EngineConfig",
    "EvictionConfig",
    "ExecutorConfig",
    "GuidedDecodingConfig",
    "KernelsConfig",
    "LogitsProcessorConfig",
    "ModelConfig",
    "PluginsConfig",
    "QuantizationConfig",
    "ResolvedConfig",
    "SamplerConfig",
    "SchedulerConfig",
    "SpecDecodeConfig",
    "load_config",
    "normalize_arguments",
]
