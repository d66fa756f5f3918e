"""The command line as a config layer."""

from __future__ import annotations

from typing import Any

import pytest

from hotshoe.config import EngineConfig, load_config
from hotshoe.config.help import describe_flags
from hotshoe.config.paths import ALIASES
from hotshoe.errors import ConfigError


def parsed(*tokens: str) -> EngineConfig:
    return load_config(cli=tokens, env={}).config


def at(config: EngineConfig, path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = getattr(value, key)
    return value


@pytest.mark.parametrize(
    ("tokens", "path", "value"),
    [
        (["--scheduler.name", "priority"], "scheduler.name", "priority"),
        (["--scheduler.name=priority"], "scheduler.name", "priority"),
        (["--scheduler", "priority"], "scheduler.name", "priority"),
        (["--cache.block-size", "32"], "cache.block_size", 32),
        (["--cache.block_size", "32"], "cache.block_size", 32),
        (["--block-size=32"], "cache.block_size", 32),
        (["--block_size", "32"], "cache.block_size", 32),
        (["--model", "some/folder"], "model.path", "some/folder"),
        (["--dtype", "float32"], "model.dtype", "float32"),
        (["--tokenizer", "t"], "model.tokenizer", "t"),
        (["--max-model-len", "9"], "model.max_model_len", 9),
        (["--max-model-len", "none"], "model.max_model_len", None),
        (["--max-num-seqs", "9"], "scheduler.max_num_seqs", 9),
        (["--max-num-batched-tokens", "9"], "scheduler.max_num_batched_tokens", 9),
        (["--long-prefill-token-threshold", "9"], "scheduler.long_prefill_token_threshold", 9),
        (["--kv-cache-memory-gb", "0.5"], "cache.memory_gb", 0.5),
        (["--attention", "triton"], "attention.name", "triton"),
        (["--spec-decode", "ngram"], "spec_decode.name", "ngram"),
        (["--spec-decode", "none"], "spec_decode.name", None),
        (["--quantization", "none"], "quantization.name", "none"),
        (["--cache.eviction", "lru"], "cache.eviction.name", "lru"),
        (["--device", "cpu"], "device", "cpu"),
        (["--seed", "1", "--seed", "2"], "seed", 2),
        (["--safe-mode"], "plugins.safe_mode", True),
        (["--safe-mode", "--no-safe-mode"], "plugins.safe_mode", False),
        (["--safe-mode", "false"], "plugins.safe_mode", False),
        (["--safe-mode=true"], "plugins.safe_mode", True),
        (["--no-enable-prefix-caching"], "cache.enable_prefix_caching", False),
        (["--no-enable-prefix-caching", "false"], "cache.enable_prefix_caching", True),
        (["--cache.no-enable-prefix-caching"], "cache.enable_prefix_caching", False),
        (["--no-cache.enable-prefix-caching"], "cache.enable_prefix_caching", False),
        (["--enable-prefix-caching=False"], "cache.enable_prefix_caching", False),
        (["--plugins.deny", "a,b", "--plugins.deny", "c"], "plugins.deny", ("a", "b", "c")),
        (["--plugins.allow", '["a"]'], "plugins.allow", ("a",)),
        (["--scheduler.options.aging", "5"], "scheduler.options", {"aging": "5"}),
        (["--scheduler.options", "aging=5"], "scheduler.options", {"aging": "5"}),
        (["--scheduler.options", '{"aging": 5}'], "scheduler.options", {"aging": 5}),
        (
            ["--scheduler.options.max-age", "5", "--scheduler.options", "tiers=[1, 2]"],
            "scheduler.options",
            {"max_age": "5", "tiers": [1, 2]},
        ),
        (["--cache.eviction.options.depth", "null"], "cache.eviction.options", {"depth": None}),
    ],
)
def test_a_flag_sets_its_field(tokens: list[str], path: str, value: object) -> None:
    assert at(parsed(*tokens), path) == value


def test_a_section_may_be_given_as_json() -> None:
    config = parsed("--scheduler", '{"name": "priority", "max_num_seqs": 3}')
    assert (config.scheduler.name, config.scheduler.max_num_seqs) == ("priority", 3)


def test_flags_may_be_given_as_a_mapping() -> None:
    flags = {"max-num-seqs": "3", "scheduler.options": {"aging": 1}, "safe_mode": True}
    resolved = load_config(cli=flags, env={})
    assert resolved.config.scheduler.max_num_seqs == 3
    assert resolved.config.scheduler.options == {"aging": 1}
    assert resolved.config.plugins.safe_mode
    assert resolved.origins["plugins.safe_mode"] == "cli --safe_mode"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--max-num-seq", "4"], "unknown flag --max-num-seq (did you mean '--max-num-seqs'?)"),
        (
            ["--cache.blok-size=4"],
            "unknown flag --cache.blok-size (did you mean '--cache.block-size'?)",
        ),
        (["--no-max-num-seqs"], "unknown flag --no-max-num-seqs"),
        (["extra"], "unexpected argument 'extra'"),
        (["--seed"], "--seed: expected a value for seed"),
        (["--seed", "--safe-mode"], "--seed: expected a value for seed"),
        (
            ["--safe-mode=perhaps"],
            "plugins.safe_mode: got 'perhaps' (cli --safe-mode), allowed: true",
        ),
        (
            ["--scheduler.options", "aging"],
            "scheduler.options: got 'aging' (cli --scheduler.options)",
        ),
        (["--scheduler.options.a.b", "1"], "unknown flag --scheduler.options.a.b"),
        (["--cache", "5"], "unknown flag --cache"),
    ],
)
def test_a_bad_command_line_is_refused(tokens: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(*tokens)
    assert message in str(caught.value)


def test_the_help_lists_every_field_and_alias_with_its_default() -> None:
    text = describe_flags()
    for alias in ALIASES:
        assert f"--{alias.replace('_', '-')}" in text
    assert "--scheduler, --scheduler.name NAME\n      Scheduler plugin. (default: fcfs)" in text
    assert "--no-enable-prefix-caching" in text
    assert "cache.eviction: Who chooses" in text
