"""hotshoe generate."""

from __future__ import annotations

import io
import json
import subprocess
from typing import Any

import msgspec
import pytest

from cli.command import COMMAND, ENVIRONMENT, LETTER_IDS, hotshoe
from hotshoe import LLM, SamplingParams
from hotshoe.config import EngineConfig
from hotshoe.config.paths import Paths
from hotshoe.entrypoints.cli.main import main
from hotshoe.entrypoints.cli.sampling_arguments import sampling_flag

GREEDY = ["--temperature", "0", "--max-tokens", "12"]


def greedy(llm: LLM, prompt: str, **changes: Any) -> str:
    """What the model writes, through the Python API."""
    params = {"temperature": 0.0, "max_tokens": 12, "allowed_token_ids": LETTER_IDS}
    return llm.generate(prompt, SamplingParams(**(params | changes)))[0].text


@pytest.fixture
def flags(model_flags: list[str], letter_flags: list[str]) -> list[str]:
    return [*model_flags, *letter_flags, *GREEDY]


def test_one_prompt_is_streamed_and_only_the_text_is_printed(llm: LLM, flags: list[str]) -> None:
    done = hotshoe("generate", "hello", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout == greedy(llm, "hello") + "\n"
    assert done.stderr == ""


def test_a_reader_that_leaves_ends_the_command_without_a_traceback(
    long_model_flags: list[str], letter_flags: list[str]
) -> None:
    process = subprocess.Popen(
        [COMMAND, "generate", "hello", *long_model_flags, *letter_flags, "--max-tokens", "none"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1).isalpha()  # it streams: long before the end
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_prompts_come_from_stdin_as_a_whole_or_line_by_line(
    llm: LLM,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main(["generate", "-", *flags]) == 0
    assert capsys.readouterr().out == greedy(llm, "one\ntwo") + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert main(["generate", "zero", "-", "--lines", *flags]) == 0
    prompts = ["zero", "one", "two"]
    assert capsys.readouterr().out == "".join(
        f"--- prompt {number}, choice 0: {prompt!r}\n{greedy(llm, prompt)}\n"
        for number, prompt in enumerate(prompts, start=1)
    )


def test_json_has_an_object_per_prompt_with_all_that_is_known(
    llm: LLM, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stop = greedy(llm, "b")[4:6]
    given = ["--logprobs", "2", "--prompt-logprobs", "0", "--n", "2", "--sampling-seed", "5"]
    assert main(["generate", "a", "b", "--json", "--stop", stop, *given, *flags]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in records] == ["a", "b"]
    record = records[1]
    assert record["prompt_token_ids"] == [ord("b")]
    assert record["prompt_logprobs"] == [None]
    assert [one["index"] for one in record["choices"]] == [0, 1]
    choice = record["choices"][0]
    assert choice["text"] == greedy(llm, "b").partition(stop)[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["seed"] == 5
    assert choice["error"] is None
    assert [entry["token_id"] for entry in choice["logprobs"]] == choice["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in choice["logprobs"])
    assert choice["cumulative_logprob"] == pytest.approx(
        sum(entry["logprob"] for entry in choice["logprobs"])
    )
    assert choice["metrics"]["total_time_s"] >= choice["metrics"]["time_to_first_token_s"] > 0
    assert records[0]["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_engine_seed_and_the_request_seed_are_two_flags(
    model_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def seed(*flags: str) -> int:
        assert main(["generate", "a", "--json", "--max-tokens", "1", *flags, *model_flags]) == 0
        found: int = json.loads(capsys.readouterr().out)["choices"][0]["seed"]
        return found

    assert seed("--sampling-seed", "9") == 9
    assert seed("--seed", "9") == seed("--seed", "9") != seed("--seed", "8")


def test_every_field_of_sampling_params_has_a_flag_that_is_no_config_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = capsys.readouterr().out
    paths = Paths.of(EngineConfig)
    for field in msgspec.structs.fields(SamplingParams):
        flag = sampling_flag(field.name)
        assert f"  {flag}" in shown
        assert paths.find(flag.removeprefix("--").replace("-", "_")) is None
    assert "smallest set of tokens whose probability reaches this" in " ".join(shown.split())


def test_flags_of_every_shape_reach_the_request(
    model_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        *("--logit-bias", '{"120": 100}', "--bad-words-token-ids", "[[121]]", "--ignore-eos"),
        *("--max-tokens", "4", "--stop", "q", "--stop", "z", "--temperature", "0"),
        *("--min-p=0.5", "--extra-args", '{"any": [1]}', "--no-skip-special-tokens"),
    ]
    assert main(["generate", "a", *flags, *model_flags]) == 0
    assert capsys.readouterr().out == "xxxx\n"


def test_a_constraint_is_given_as_json_or_by_the_flag_of_its_kind(
    model_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    schema = '{"const": "sky"}'
    for flags, expected in (
        (["--structured-outputs", f'{{"json": {schema}}}'], ['"sky"']),
        (["--structured-outputs.json", schema], ['"sky"']),
        (["--structured-outputs.regex", "ab?c{2}", "--structured-outputs.backend", "xgrammar"],
         ["abcc", "acc"]),
        (["--structured-outputs.choice", "red", "--structured-outputs.choice", "blue"],
         ["red", "blue"]),
    ):  # fmt: skip
        assert main(["generate", "a", *flags, *model_flags]) == 0
        assert capsys.readouterr().out.strip() in expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--top-p", "2"], "top_p: got 2.0, allowed: above 0, at most 1"),
        (["a", "--top-k", "many"], "argument --top-k: got 'many': Expected `int`, got `str`"),
        (["a", "--logit-bias", "{"], "argument --logit-bias: got '{': Input data was truncated"),
        (["a", "--structured-outputs", "{}"], "allowed: exactly one kind of constraint"),
        (
            ["a", "--structured-outputs.regex", "b", "--structured-outputs", '{"regex": "b"}'],
            "--structured-outputs and --structured-outputs.regex say the same; drop one",
        ),
        (["a", "--min-tokens", "200"], "min_tokens: got 200, allowed: at most max_tokens"),
        (["a", "b", "--stream"], "--stream needs a single prompt, n of 1, and no --json"),
        (["a", "--lines"], "--lines is about prompts from stdin; give - as the prompt"),
        (["-", "-"], "- is given twice, but stdin can be read only once"),
        (["a", "--no-detokenize"], "--no-detokenize leaves no text to print; add --json"),
        (["a", "--logprobs", "2"], "--logprobs is shown in JSON only; add --json or drop it"),
        (["a", "--prompt-logprobs", "0"], "--prompt-logprobs is shown in JSON only; add --json"),
        ([], "the following arguments are required: PROMPT"),
        (["a", "--model", "/nowhere/at-all"], "'/nowhere/at-all': no such file or folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


def test_bytes_that_are_no_text_are_refused_with_their_place(model_flags: list[str]) -> None:
    done = subprocess.run(
        [COMMAND, "generate", "-", *model_flags],
        input=b"caf\xe9",
        capture_output=True,
        check=False,
        env=ENVIRONMENT | {"PYTHONIOENCODING": "utf-8:strict"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: text can't be tokenized: character 3 is the lone")


def test_text_that_the_terminal_has_no_characters_for_is_escaped(model_flags: list[str]) -> None:
    done = subprocess.run(
        # the first byte of a character is all that may be written: it shows as U+FFFD
        [COMMAND, "generate", "a", *model_flags, "--allowed-token-ids", "226", "--max-tokens=1"],
        capture_output=True,
        check=False,
        env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"\\ufffd\n"


def test_a_prompt_that_is_too_long_says_so(
    model_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "a" * 300, *model_flags]) == 2
    shown = capsys.readouterr().err
    assert "prompt has 300 tokens but max_model_len is 256" in shown
