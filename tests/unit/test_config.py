"""How a config is resolved from its layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from hotshoe.config import EngineConfig, load_config, normalize_arguments
from hotshoe.errors import ConfigError


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def refused(**sources: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(**{"env": {}, **sources})  # type: ignore[arg-type]
    return str(caught.value)


def test_each_layer_wins_over_the_ones_below_and_is_named_as_origin(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "server.yaml",
        "scheduler: {max_num_seqs: 1, max_num_batched_tokens: 1}\nmodel: {max_model_len: 1}\n"
        "cache: {num_blocks: 1}\n",
    )
    resolved = load_config(
        file,
        ["--max-num-batched-tokens", "3", "--max-model-len", "3"],
        env={
            "HOTSHOE_SCHEDULER__MAX_NUM_SEQS": "2",
            "HOTSHOE_SCHEDULER__MAX_NUM_BATCHED_TOKENS": "2",
            "HOTSHOE_MODEL__MAX_MODEL_LEN": "2",
            "PATH": "/bin",
        },
        overrides={"model": {"max_model_len": 4}},
    )
    config, origins = resolved.config, resolved.origins
    assert config.cache.num_blocks == 1
    assert config.scheduler.max_num_seqs == 2
    assert config.scheduler.max_num_batched_tokens == 3
    assert config.model.max_model_len == 4
    assert origins["cache.num_blocks"] == f"file {file}"
    assert origins["scheduler.max_num_seqs"] == "env HOTSHOE_SCHEDULER__MAX_NUM_SEQS"
    assert origins["scheduler.max_num_batched_tokens"] == "cli --max-num-batched-tokens"
    assert origins["model.max_model_len"] == "argument"
    assert origins["cache.block_size"] == "default"


def test_without_sources_every_value_is_the_default() -> None:
    resolved = load_config(env={})
    assert resolved.config == EngineConfig()
    assert set(resolved.origins.values()) == {"default"}
    assert resolved.config.model.path == "embedded"
    assert resolved.config.cache.block_size == 16
    assert resolved.config.cache.enable_prefix_caching
    assert resolved.config.spec_decode.name is None


def test_building_the_model_directly_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSHOE_SEED", "9")
    assert EngineConfig().seed == 0
    assert load_config().config.seed == 9


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "cache:\n  block_size: 32\n  eviction: lru\nseed: 3\n"),
        ("a.yml", "cache: {block_size: 32}\nseed: 3\n"),
        ("a.toml", 'seed = 3\n[cache]\nblock_size = 32\nmemory_gb = "none"\n'),
        ("a.json", '{"cache": {"block_size": 32}, "seed": 3}'),
    ],
)
def test_a_file_is_read_by_its_extension(tmp_path: Path, name: str, text: str) -> None:
    config = load_config(write(tmp_path, name, text), env={}).config
    assert (config.cache.block_size, config.seed) == (32, 3)
    assert config.cache.memory_gb is None


@pytest.mark.parametrize("name", ["empty.yaml", "empty.toml", "empty.json"])
def test_an_empty_file_changes_nothing(tmp_path: Path, name: str) -> None:
    assert load_config(write(tmp_path, name, ""), env={}).config == EngineConfig()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "seed: 1\nseed: 2\n", "key 'seed' is given twice"),
        ("a.json", '{"seed": 1, "seed": 2}', "key 'seed' is given twice"),
        ("a.toml", "seed = 1\nseed = 2\n", "can't parse config file"),
        ("a.yaml", "seed: [1\n", "can't parse config file"),
        ("a.yaml", "- 1\n", "holds a list, expected a mapping"),
        ("a.yaml", "1: 2\n", "key 1 is not text (file"),
        ("a.yaml", "on: 2\n", "key True is not text (file"),
        ("a.yaml", "scheduler: {options: {1: 2}}\n", "scheduler.options: key 1 is not text"),
        ("a.yaml", "cache: 5\n", "cache: got 5 (file"),
        ("a.yaml", "scheduler: {options: 5}\n", "scheduler.options: got 5 (file"),
        ("a.ini", "", "must end in .yaml, .yml, .toml or .json"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    assert message in refused(file=write(tmp_path, name, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"
    assert refused(file=file) == f"can't read config file {str(file)!r}: No such file or directory"


def test_numbers_in_a_file_must_not_be_text_or_booleans(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "cache: {block_size: '16'}\nscheduler: {max_num_seqs: true}\n")
    message = refused(file=file)
    assert (
        f"cache.block_size: got '16' (file {file}), allowed: a power of two, 1 or more" in message
    )
    assert f"scheduler.max_num_seqs: got True (file {file}), allowed: an integer >= 1" in message


def test_options_merge_key_by_key_under_the_same_plugin(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "scheduler: {name: priority, options: {aging: 1, cap: 2}}\n")
    resolved = load_config(
        file, ["--scheduler", "priority"], env={"HOTSHOE_SCHEDULER__OPTIONS__AGING": "5"}
    )
    assert resolved.config.scheduler.options == {"aging": "5", "cap": 2}
    assert resolved.origins["scheduler.options.aging"] == "env HOTSHOE_SCHEDULER__OPTIONS__AGING"
    assert resolved.origins["scheduler.options.cap"] == f"file {file}"
    assert "scheduler.options" not in resolved.origins


def test_selecting_another_plugin_drops_the_options_of_lower_layers(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "scheduler: {name: priority, options: {aging: 1}}\n")
    resolved = load_config(file, ["--scheduler", "fair", "--scheduler.options.share=2"], env={})
    assert resolved.config.scheduler.options == {"share": "2"}
    assert resolved.notes == (
        f"scheduler.options.aging (file {file}) is for 'priority' and dropped, as cli --scheduler "
        "selects 'fair'",
    )


def test_naming_the_default_plugin_keeps_the_options_of_lower_layers(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "cache: {eviction: {options: {depth: 1}}}\n")
    resolved = load_config(file, overrides={"cache": {"eviction": "lru"}}, env={})
    assert resolved.config.cache.eviction.options == {"depth": 1}
    assert resolved.notes == ()


def test_lists_of_a_higher_layer_replace_those_below(tmp_path: Path) -> None:
    file = write(
        tmp_path, "a.yaml", "sampler: {logits_processors: [a, {name: b, apply: always}]}\n"
    )
    below = load_config(file, env={}).config.sampler.logits_processors
    assert [(item.name, item.apply) for item in below] == [("a", "on_request"), ("b", "always")]
    above = load_config(file, ["--logits-processors", "c"], env={}).config.sampler.logits_processors
    assert [item.name for item in above] == ["c"]


def test_an_unknown_variable_is_an_error_with_the_closest_match() -> None:
    message = refused(env={"HOTSHOE_CACHE__BLOKSIZE": "1", "HOTSHOE_MAX_NUM_SEQS": "1"})
    assert "2 problems in the configuration" in message
    assert (
        "HOTSHOE_CACHE__BLOKSIZE matches no config field "
        "(did you mean 'HOTSHOE_CACHE__BLOCK_SIZE'?)" in message
    )
    assert "did you mean 'HOTSHOE_SCHEDULER__MAX_NUM_SEQS'?" in message


def test_variables_take_component_names_json_and_lists() -> None:
    config = load_config(
        env={
            "HOTSHOE_SCHEDULER": "priority",
            "HOTSHOE_ATTENTION": '{"name": "triton", "options": {"tiles": [1]}}',
            "HOTSHOE_PLUGINS__ALLOW": "a, b",
            "HOTSHOE_SCHEDULER__OPTIONS": '{"aging": 2}',
            "HOTSHOE_CACHE__MEMORY_GB": "1.5",
            "HOTSHOE_MODEL__MAX_MODEL_LEN": "none",
        }
    ).config
    assert config.scheduler.name == "priority"
    assert config.scheduler.options == {"aging": 2}
    assert (config.attention.name, config.attention.options) == ("triton", {"tiles": [1]})
    assert config.plugins.allow == ("a", "b")
    assert config.cache.memory_gb == 1.5
    assert config.model.max_model_len is None


def test_two_variables_for_one_field_are_refused() -> None:
    message = refused(env={"HOTSHOE_SCHEDULER": "a", "HOTSHOE_SCHEDULER__NAME": "b"})
    assert message == (
        "scheduler.name: given twice, by env HOTSHOE_SCHEDULER and env HOTSHOE_SCHEDULER__NAME; "
        "give it once"
    )


def test_all_problems_are_reported_at_once_with_path_value_allowed_and_origin(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, "a.yaml", "scheduler: {nam: x}\ncach: {}\n")
    message = refused(
        file=file,
        env={"HOTSHOE_CACHE__BLOCK_SIZE": "15", "HOTSHOE_NOPE": "1"},
        cli=["--seed", "abc", "--dtype", "float8"],
        overrides={"cache": {"memory_fraction": 1.5}},
    )
    assert message.startswith("7 problems in the configuration:\n")
    assert (
        "cache.block_size: got 15 (env HOTSHOE_CACHE__BLOCK_SIZE), allowed: a power of two"
        in message
    )
    assert "seed: got 'abc' (cli --seed), allowed: an integer >= 0 and < " in message
    assert (
        "model.dtype: got 'float8' (cli --dtype), allowed: one of 'auto', 'float32', 'bfloat16', "
        "'float16'" in message
    )
    assert "cache.memory_fraction: got 1.5 (argument), allowed: a number > 0 and <= 1" in message
    assert f"scheduler.nam: unknown key (file {file}); known: long_prefill" in message
    assert "(did you mean 'name'?)" in message
    assert f"cach: unknown key (file {file})" in message
    assert "(did you mean 'cache'?)" in message


def test_a_bad_item_of_a_list_is_named_by_its_position() -> None:
    message = refused(overrides={"logits_processors": ["a", {"name": "b", "aply": "always"}]})
    assert message == (
        "sampler.logits_processors[1].aply: unknown key (argument); known: apply, name, options "
        "(did you mean 'apply'?)"
    )


@pytest.mark.parametrize(
    ("overrides", "paths"),
    [
        ({"cache": {"num_blocks": 8, "memory_gb": 1.0}}, ["cache.num_blocks", "cache.memory_gb"]),
        (
            {"cache": {"num_blocks": 2}, "max_model_len": 64},
            ["model.max_model_len is 64", "cache.num_blocks", "hold 32 tokens"],
        ),
        (
            {"long_prefill_token_threshold": 64, "max_num_batched_tokens": 32},
            ["long_prefill_token_threshold is 64", "max_num_batched_tokens is 32"],
        ),
        ({"spec_decode": {"options": {"k": 1}}}, ["spec_decode.options", "spec_decode.name"]),
    ],
)
def test_contradictions_name_both_paths(overrides: dict[str, object], paths: list[str]) -> None:
    message = refused(overrides=overrides)
    assert all(path in message for path in paths), message


def test_the_config_is_frozen_and_refuses_unknown_fields() -> None:
    config = load_config(env={}).config
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        config.cache.block_size = 1
    with pytest.raises(ValidationError, match="Extra inputs"):
        EngineConfig(nope=1)  # type: ignore[call-arg]


def test_keyword_arguments_are_sorted_into_sections() -> None:
    arguments = normalize_arguments(
        model="folder",
        scheduler="priority",
        spec_decode=None,
        cache={"eviction": "lru"},
        block_size=32,
        max_model_len=64,
        safe_mode=True,
        seed=7,
    )
    assert arguments == {
        "model": {"path": "folder", "max_model_len": 64},
        "scheduler": {"name": "priority"},
        "spec_decode": {"name": None},
        "cache": {"eviction": {"name": "lru"}, "block_size": 32},
        "plugins": {"safe_mode": True},
        "seed": 7,
    }
    assert load_config(env={}, overrides=arguments).config.model.path == "folder"


def test_sections_may_be_given_as_objects() -> None:
    scheduler = EngineConfig().scheduler.model_copy(update={"max_num_seqs": 3})
    resolved = load_config(env={}, overrides={"scheduler": scheduler})
    assert resolved.config.scheduler == scheduler


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_modl_len": 1}, "unknown argument 'max_modl_len' (did you mean 'max_model_len'?)"),
        (
            {"dtype": "float32", "model": {"dtype": "auto"}},
            "model.dtype: given twice, by argument; give it once",
        ),
        ({"cache": 5}, "cache: got 5 (argument), allowed: a mapping"),
        (
            {"kernels": None},
            "kernels: got None (argument), allowed: a mapping, or text for kernels",
        ),
    ],
)
def test_bad_keyword_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        normalize_arguments(**arguments)
    assert str(caught.value).startswith(message)


def test_a_config_survives_a_round_trip_through_json(tmp_path: Path) -> None:
    config = load_config(
        cli=["--logits-processors", "a", "--plugins.allow", "x", "--seed", "4"],
        env={},
    ).config
    file = write(tmp_path, "a.json", json.dumps(config.model_dump(mode="json")))
    assert load_config(file, env={}).config == config


def test_importing_the_config_imports_no_torch() -> None:
    code = (
        "import sys, hotshoe.config; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
