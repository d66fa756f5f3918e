"""Incremental text against decoding everything at once, for each kind of tokenizer."""

import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from hotshoe.text.detokenizer import IncrementalDetokenizer
from hotshoe.text.tokenizer import Tokenizer, load_tokenizer

WORDS = ["hello", "world", "a", "b", "\u4f60", "\u597d", "!", "\u00e9"]


def byte_level() -> Tokenizer:
    """Every byte, some words, a special token, and added tokens outside the alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<tool call>", special=False), AddedToken("\u4f60\u597d")])
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer("byte-level", backend, special_tokens={}, chat_template=None)


def sentencepiece() -> Tokenizer:
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += [*WORDS, *("\u2581" + word for word in WORDS)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer("sentencepiece", backend, special_tokens={}, chat_template=None)


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "[SEP]", *WORDS, *("##" + word for word in WORDS)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[SEP]", special=True)])
    return Tokenizer("word-piece", backend, special_tokens={}, chat_template=None)


BYTE_LEVEL, SENTENCEPIECE, WORD_PIECE = byte_level(), sentencepiece(), word_piece()
EMBEDDED = load_tokenizer("embedded")


def incremental(
    tokenizer: Tokenizer, prompt: list[int], pieces: list[list[int]], *, skip: bool
) -> str:
    detokenizer = IncrementalDetokenizer.create(tokenizer, prompt, skip_special_tokens=skip)
    deltas = [detokenizer.add(piece) for piece in pieces]
    return "".join([*deltas, detokenizer.flush()])


def at_once(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool) -> str:
    """``decode(prompt + output)`` minus what of it ``decode(prompt)`` has too."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    if not whole.startswith(before):  # the output completed the prompt's last character
        before = before[:-1]
    assert whole.startswith(before)
    return whole[len(before) :]


def check(tokenizer: Tokenizer, prompt: list[int], pieces: list[list[int]], skip: bool) -> None:
    output = [token_id for piece in pieces for token_id in piece]
    expected = at_once(tokenizer, prompt, output, skip=skip)
    assert incremental(tokenizer, prompt, pieces, skip=skip) == expected


def token_lists(num_tokens: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, num_tokens - 1), max_size=4), max_size=12)


@given(st.lists(st.integers(0, 258), max_size=6), token_lists(259 + 5), st.booleans())
@settings(max_examples=300, deadline=None)
def test_byte_level_pieces_join_to_the_whole_text_whatever_the_bytes(
    prompt: list[int], pieces: list[list[int]], skip: bool
) -> None:
    check(BYTE_LEVEL, prompt, pieces, skip)


@given(st.text(), st.text(), st.data(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_sentencepiece_pieces_of_valid_text_join_to_the_whole_text(
    before: str, text: str, data: st.DataObject, skip: bool
) -> None:
    prompt = SENTENCEPIECE.encode(before, add_special_tokens=False)
    if data.draw(st.booleans()):
        prompt.insert(0, 1)
    output = SENTENCEPIECE.encode(text, add_special_tokens=False)
    if data.draw(st.booleans()):
        output.insert(0, data.draw(st.integers(0, 1)))
    check(SENTENCEPIECE, prompt, [[token_id] for token_id in output], skip)


@given(st.lists(st.integers(0, 17), max_size=9), token_lists(18), st.booleans())
@settings(max_examples=200, deadline=None)
def test_word_pieces_join_to_the_whole_text(
    prompt: list[int], pieces: list[list[int]], skip: bool
) -> None:
    check(WORD_PIECE, prompt, pieces, skip)


@given(st.data(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_random_tokens_of_the_embedded_model_join_to_the_whole_text(
    data: st.DataObject, skip: bool
) -> None:
    # half of them single bytes and special tokens, which a uniform draw would hardly meet
    token_ids = st.one_of(st.integers(0, EMBEDDED.vocab_size - 1), st.integers(0, 290))
    prompt = data.draw(st.lists(token_ids, max_size=5))
    output = data.draw(st.lists(token_ids, max_size=40))
    check(EMBEDDED, prompt, [[token_id] for token_id in output], skip)


@given(st.text(min_size=1))
@settings(deadline=None)
def test_no_delta_ends_within_a_character(text: str) -> None:
    token_ids = EMBEDDED.encode(text)
    text = EMBEDDED.decode(token_ids, skip_special_tokens=False)
    assume("\ufffd" not in text)  # the vocabulary lacks a few bytes
    detokenizer = IncrementalDetokenizer.create(EMBEDDED, [], skip_special_tokens=False)
    shown = ""
    for token_id in token_ids:
        shown += detokenizer.add([token_id])
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text


def test_character_begun_in_the_prompt_belongs_to_the_output() -> None:
    first, second = "\u00e9".encode()
    table = BYTE_LEVEL.token_bytes()
    prompt, output = [table.index(bytes([first]))], [table.index(bytes([second]))]
    assert incremental(BYTE_LEVEL, prompt, [output], skip=True) == "\u00e9"
    assert incremental(BYTE_LEVEL, prompt, [], skip=True) == ""


def test_unfinished_character_is_shown_as_replacement_only_at_the_end() -> None:
    half = BYTE_LEVEL.token_bytes().index(b"\xc3")
    detokenizer = IncrementalDetokenizer.create(BYTE_LEVEL, [], skip_special_tokens=True)
    assert detokenizer.add([half]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_token_ids_beyond_the_vocabulary_stand_for_nothing() -> None:
    assert incremental(BYTE_LEVEL, [10**6], [[10**6], [40, 10**6]], skip=True) == (
        BYTE_LEVEL.decode([40], skip_special_tokens=True)
    )


def test_bytes_of_all_tokens_of_the_embedded_model_are_their_decoded_text() -> None:
    for token_id, data in enumerate(EMBEDDED.token_bytes()):
        text = EMBEDDED.decode([token_id], skip_special_tokens=False)
        assert data.decode("utf-8", "replace") == text
