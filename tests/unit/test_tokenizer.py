"""Tokenizers from GGUF headers and folders, chat templates and messages."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from hotshoe.errors import ModelLoadError, RequestError
from hotshoe.text.chat import render_chat
from hotshoe.text.gguf_tokenizer import build_tokenizer
from hotshoe.text.tokenizer import Tokenizer, load_tokenizer
from hotshoe.weights.checkpoint import Checkpoint, find_embedded_model, open_checkpoint

# ids as transformers gives them, once its GGUF reader's lost Digits step is put back
EMBEDDED_IDS = {
    "Hello world": [19556, 905],
    "  12 apples": [256, 33, 34, 13855],
    "x = 3.14\n\treturn x": [104, 446, 216, 35, 30, 33, 36, 198, 197, 5406, 1792],
    "\u4f60\u597d \U0001f600 na\u00efve": [18645, 250, 48392, 138, 40303, 218, 15486, 46494],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "": [],
}
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
EMBEDDED = load_tokenizer("embedded")


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with open_checkpoint("embedded") as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(checkpoint)


@pytest.fixture(scope="module")
def saved_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.hf.save_pretrained(folder)
    return folder


def test_embedded_tokenizer_gives_the_known_ids(tokenizer: Tokenizer) -> None:
    for text, token_ids in EMBEDDED_IDS.items():
        assert tokenizer.encode(text) == token_ids
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert tokenizer.encode_batch(list(EMBEDDED_IDS)) == list(EMBEDDED_IDS.values())


def test_embedded_tokenizer_knows_its_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_token_ids == frozenset(range(17))
    text = tokenizer.decode([1, 6004, 2], skip_special_tokens=True)
    assert text == tokenizer.decode([6004], skip_special_tokens=True) == "hi"


@pytest.mark.slow
def test_embedded_tokenizer_equals_the_repaired_one_of_transformers(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    path = find_embedded_model()
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    mine, theirs = (
        json.loads(text)
        for text in (tokenizer.tokenizer_json, reference.backend_tokenizer.to_str())
    )
    assert mine["added_tokens"] == theirs["added_tokens"]
    for key in ("vocab", "merges"):
        assert mine["model"][key] == theirs["model"][key]
    rng = random.Random(0)
    alphabet = "abcXYZ 0123456789\n\t.,'s\u00e9\u4f60\u0663\U0001f600<|im_end|>\u200b"
    for _ in range(2000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(40)))
        assert tokenizer.encode(text) == reference.encode(text), text
        token_ids = [rng.randrange(49152) for _ in range(20)]
        for skip in (True, False):
            expected = reference.decode(token_ids, skip_special_tokens=skip)
            assert tokenizer.decode(token_ids, skip_special_tokens=skip) == expected
    assert reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == (
        tokenizer.decode(tokenizer.apply_chat_template(MESSAGES), skip_special_tokens=False)
    )


@given(st.text())
@settings(deadline=None)
def test_encoding_equals_the_transformers_object_around_it(text: str) -> None:
    assert EMBEDDED.encode(text) == EMBEDDED.hf.encode(text)


def test_loading_the_embedded_tokenizer_needs_no_transformers() -> None:
    code = (
        "import sys; from hotshoe.text.tokenizer import load_tokenizer;"
        "t = load_tokenizer('embedded'); t.encode('a'); t.token_bytes();"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lone_surrogate_is_a_bad_request(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"character 1 is the lone surrogate '\\ud800'"):
        tokenizer.encode("a\ud800")
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode_batch(["fine", "a\ud800"])


def header(kind: str = "gpt2", pre: str = "gpt-2", **extra: Any) -> dict[str, Any]:
    """A byte-level vocabulary with merges of digits, and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "12", "123", "1234", "<s>", "</s>", "<think>"]
    metadata = {
        "model": kind,
        "pre": pre,
        "tokens": tokens,
        "merges": ["1 2", "12 3", "123 4"],
        "token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "bos_token_id": len(tokens) - 3,
        "eos_token_id": len(tokens) - 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | extra).items()}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
    ],
)
def test_digits_are_grouped_as_the_named_way_of_splitting_asks(pre: str, pieces: list[str]) -> None:
    backend = build_tokenizer(header(pre=pre), "m")
    assert backend.encode("1234", add_special_tokens=False).tokens == pieces


def test_begin_and_end_tokens_are_added_as_the_header_says() -> None:
    for pre, extra, expected in (
        ("gpt-2", {}, ["a"]),
        ("llama-bpe", {}, ["<s>", "a"]),
        ("llama-bpe", {"add_bos_token": False}, ["a"]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ["<s>", "a", "</s>"]),
    ):
        backend = build_tokenizer(header(pre=pre, **extra), "m")
        assert backend.encode("a").tokens == expected
        assert backend.encode("a", add_special_tokens=False).tokens == ["a"]


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    backend = build_tokenizer(header(), "m")
    token_ids = backend.encode("a<think></s>").ids
    assert backend.decode(token_ids, skip_special_tokens=True) == "a<think>"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (header(kind="bert"), "tokenizer of kind 'bert'; supported in GGUF: 'gpt2', 'llama'"),
        (header(pre="tekken"), r"the 'tekken' way .*supported in GGUF: gpt-2, smollm"),
        (header(merges=[]), r"no tokenizer\.ggml\.merges"),
        (header(merges=["no such"]), "its GGUF merges are damaged"),
        (header(tokens=["a", "a"]), "a token appears twice"),
        (header(add_bos_token=True, bos_token_id=None), "adds a bos token, but the GGUF header"),
        ({}, "tokenizer of kind None"),
    ],
    ids=["kind", "pre", "no-merges", "bad-merges", "twice", "bos", "nothing"],
)
def test_headers_without_a_usable_tokenizer_are_refused(
    metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        build_tokenizer(metadata, "m")


def test_sentencepiece_from_scores_equals_what_transformers_builds(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["\u2581", *"helowrd", "he", "ll", "hell", "hello", "\u2581w", "or", "\u2581wor", "ld"]
    words += ["\u2581world", "\u2581he", "lo", "\u2581hello"]
    scores = [0.0] * len(pieces) + [-float(i) for i in range(len(words))]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    writer = gguf.GGUFWriter(tmp_path / "spm.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*pieces, *words])
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        getattr(writer, f"add_{name}")(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((len(scores), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = load_tokenizer(str(tmp_path / "spm.gguf"))
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="spm.gguf")
    for text in ("hello world", "hellohello  world", "w\u00e9ird \u4f60", "x\n", ""):
        expected = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.decode(expected, skip_special_tokens=True) == text
    # SentencePiece puts its space before every text, also before one that starts with a space;
    # transformers leaves it out there
    spaced = tokenizer.encode(" hello", add_special_tokens=False)
    assert tokenizer.decode(spaced, skip_special_tokens=True) == " hello"
    assert tokenizer.encode("hello") == [1, *tokenizer.encode("hello", add_special_tokens=False)]
    assert tokenizer.token_bytes()[3 + 0xE4] == b"\xe4"
    assert tokenizer.token_bytes()[tokenizer.encode("hello")[-1]] == b" hello"


def test_tokenizer_saved_in_a_folder_is_the_same_tokenizer(
    saved_folder: Path, tokenizer: Tokenizer, checkpoint: Checkpoint
) -> None:
    loaded = load_tokenizer(checkpoint, tokenizer=str(saved_folder))
    for text in EMBEDDED_IDS:
        assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.apply_chat_template(MESSAGES) == tokenizer.apply_chat_template(MESSAGES)
    assert loaded.token_bytes() == tokenizer.token_bytes()
    assert loaded.eos_token_ids == tokenizer.eos_token_ids
    assert loaded.bos_token_id == tokenizer.bos_token_id


def test_truncation_saved_with_a_tokenizer_never_shortens_a_prompt(
    saved_folder: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    for file in saved_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(checkpoint, tokenizer=str(tmp_path))
    assert len(loaded.encode("a b c d e f g h i j")) == 10
    assert len(loaded.encode("a")) == 1


def test_missing_tokenizers_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        load_tokenizer(checkpoint, tokenizer="./nowhere")
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json; add it"):
        load_tokenizer(checkpoint, tokenizer=str(tmp_path))


def test_eos_ids_of_all_configs_end_a_generation() -> None:
    with open_checkpoint("embedded") as changed:
        changed.generation_config = {"eos_token_id": [7, 2, 0]}
        assert load_tokenizer(changed).eos_token_ids == (2, 7, 0)


def test_bytes_per_token_are_refused_for_other_kinds_of_tokenizer() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    word_level = Tokenizer("words", backend, special_tokens={}, chat_template=None)
    with pytest.raises(ModelLoadError, match="'words' has no table of bytes per token"):
        word_level.token_bytes()


def test_chat_ids_equal_those_of_transformers(tokenizer: Tokenizer) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "Sure? <|im_end|>"},
    ]
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        expected = tokenizer.hf.apply_chat_template(conversation, return_dict=False, **options)
        assert tokenizer.apply_chat_template(conversation, **options) == expected
        assert render_chat(tokenizer, conversation, **options) == expected


def test_chat_template_can_be_replaced_inline_or_by_a_file(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ mood }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(source)
    for template in (source, str(tmp_path / "t.jinja")):
        loaded = load_tokenizer(checkpoint, chat_template=template)
        token_ids = render_chat(loaded, [{"role": "user", "content": "hi"}], mood="!")
        assert loaded.decode(token_ids, skip_special_tokens=False) == "[user]hi!"
    with pytest.raises(ModelLoadError, match=r"can't read chat template 'nowhere\.jinja'"):
        load_tokenizer(checkpoint, chat_template="nowhere.jinja")


def test_refusals_of_a_template_are_bad_requests(checkpoint: Checkpoint) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    loaded = load_tokenizer(checkpoint, chat_template=source)
    with pytest.raises(RequestError, match="refused the conversation: roles must alternate"):
        render_chat(loaded, MESSAGES)


def test_model_without_a_chat_template_says_what_to_set() -> None:
    backend = build_tokenizer(header(), "m")
    plain = Tokenizer("m", backend, special_tokens={}, chat_template=None)
    with pytest.raises(RequestError, match=r"'m' has no chat template; set model\.chat_template"):
        render_chat(plain, MESSAGES)


def test_opening_and_continuing_a_turn_at_once_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="can't both be true"):
        render_chat(tokenizer, MESSAGES, continue_final_message=True)


def test_text_parts_are_joined(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "12 + 30?"}]
    in_parts = render_chat(tokenizer, [{"role": "user", "content": parts}])
    assert in_parts == render_chat(tokenizer, MESSAGES)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages: expected a list of messages, got str"),
        ([], "messages: the list is empty"),
        (["hi"], r"messages\[0\]: expected role and content, got str"),
        ([*MESSAGES, {"content": "x"}], r"messages\[1\]\.role: got None"),
        ([{"role": "user"}], r"messages\[0\]\.content: is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: got int"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]: expected a content part, got str"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content\[0\]: parts of type 'image_url' are not supported",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text: got NoneType"),
    ],
)
def test_malformed_messages_are_named(tokenizer: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat(tokenizer, messages)
