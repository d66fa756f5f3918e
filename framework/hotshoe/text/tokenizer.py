"""``Tokenizer``: text to token ids and back, chat templates, and the bytes that each token stands
for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from hotshoe.errors import ModelLoadError, RequestError
from hotshoe.text.gguf_tokenizer import build_tokenizer, special_token
from hotshoe.text.token_bytes import TokenBytes
from hotshoe.weights.checkpoint import Checkpoint, locate_model, open_checkpoint
from hotshoe.weights.gguf import read_gguf_header

_TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
TOKENIZER_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")
# transformers turns some older files into a tokenizer.json of its own
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Tokenizer:
    """One model's tokenizer. Safe to share between threads.

    Encoding and decoding go straight to the ``tokenizers`` library; ``transformers`` renders chat
    templates, and is imported only then or when the tokenizer came from a folder.

    Attributes:
        name: what it was loaded from.
        chat_template: Jinja source; None if the model has none.
        bos_token_id: None if the model has none.
        eos_token_ids: every token that ends a generation, the tokenizer's own first.
    """

    def __init__(
        self,
        name: str,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        eos_token_ids: Sequence[int] = (),
        hf: PreTrainedTokenizerFast | None = None,
    ) -> None:
        """Wrap a ``tokenizers`` object.

        Args:
            special_tokens: text by role (``bos_token``, ``eos_token``, ``pad_token``,
                ``unk_token``).
            eos_token_ids: from the model's configs, on top of the tokenizer's own.
            hf: the ``transformers`` tokenizer around ``backend``; made when needed if None.
        """
        self.name = name
        self.chat_template = chat_template
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        if hf is not None:
            self.hf = hf
        # a tokenizer.json may ask to cut or pad every text it encodes; prompts must stay whole
        backend.no_truncation()
        backend.no_padding()
        self.bos_token_id = self._special_token_id("bos_token")
        own_eos = self._special_token_id("eos_token")
        all_eos = eos_token_ids if own_eos is None else (own_eos, *eos_token_ids)
        self.eos_token_ids = tuple(dict.fromkeys(all_eos))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's may be larger, by padding."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def tokens(self) -> list[str]:
        """Each token's own string by id, added ones too; empty for an id that is not used."""
        vocab = self._backend.get_vocab(with_added_tokens=True)
        strings = [""] * (max(vocab.values(), default=-1) + 1)
        for string, token_id in vocab.items():
            strings[token_id] = string
        return strings

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer in the ``tokenizer.json`` format."""
        return self._backend.to_str()

    @cached_property
    def hf(self) -> PreTrainedTokenizerFast:
        """The same tokenizer as a ``transformers`` object."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # of the library
            tokenizer_object=self._backend,
            chat_template=self.chat_template,
            clean_up_tokenization_spaces=False,
            **self._special_tokens,
        )

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Every token that ``skip_special_tokens`` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def bytes_table(self) -> TokenBytes | None:
        """The bytes of every token; None if this kind of tokenizer has no such table."""
        return TokenBytes.from_tokenizer(self._backend)

    def token_bytes(self) -> list[bytes]:
        """The bytes that each id adds to the text, by id, special tokens included.

        Raises:
            ModelLoadError: if this kind of tokenizer has no such table.
        """
        if self.bytes_table is None:
            raise ModelLoadError(
                f"tokenizer {self.name!r} has no table of bytes per token (it is neither "
                "byte-level nor SentencePiece); guided decoding can't be used with it"
            )
        return self.bytes_table.all

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            RequestError: if the text isn't valid Unicode.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise _encoding_error(text) from error

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """``encode`` over many texts, in parallel threads."""
        try:
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise _encoding_error(*texts) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids; ids that no token has stand for nothing, broken UTF-8 for U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, as ``transformers`` renders it.

        Args:
            add_generation_prompt: open the assistant's next turn.
            continue_final_message: leave the last message open instead, to be continued.
            tools: JSON schemas of functions that the model may call.
            chat_template: Jinja source to use instead of the model's.
            kwargs: further variables of the template.

        Raises:
            RequestError: if the model has no chat template, or it refuses the conversation.
        """
        if chat_template is None and self.chat_template is None:
            raise RequestError(
                f"model {self.name!r} has no chat template; set model.chat_template, "
                "or send a plain prompt"
            )
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message can't both be true: "
                "one opens a new turn, the other continues the last one"
            )
        return self.encode(
            self._render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template or self.chat_template,
                **kwargs,
            ),
            add_special_tokens=False,
        )

    def _render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        from jinja2 import TemplateError

        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                **kwargs,
            )
        except (TemplateError, *_TEMPLATE_ERRORS) as error:
            # templates raise these themselves, for conversations they have no form for, or
            # stumble over a variable
            raise RequestError(
                f"the chat template of {self.name!r} refused the conversation: {error}"
            ) from error
        assert isinstance(text, str)  # one conversation, not tokenized
        return text

    def _special_token_id(self, role: str) -> int | None:
        token = self._special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)


class MissingTokenizer(Tokenizer):
    """Stands for the tokenizer of a model that has none: prompts and outputs are token ids.

    Args:
        checkpoint: of the model.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.name = checkpoint.name
        self.chat_template = None
        self.bos_token_id = checkpoint.config.get("bos_token_id")
        eos_token_ids = _eos_token_ids(checkpoint.config, checkpoint.generation_config)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))

    def refusal(self, what: str, remedy: str = "") -> RequestError:
        """That something can't be done."""
        return RequestError(
            f"model {self.name!r} has no tokenizer, so {what}; {remedy and remedy + ', or '}set "
            "model.tokenizer to a folder, GGUF file or hub id that has one ('embedded' for that of "
            "the embedded model)"
        )

    @property
    def vocab_size(self) -> int:
        """Refused."""
        raise self.refusal("it can't be told which tokens are ordinary ones")

    @property
    def tokens(self) -> list[str]:
        """Refused."""
        raise self.refusal("tokens have no strings")

    @property
    def tokenizer_json(self) -> str:
        """Refused."""
        raise self.refusal("there is no tokenizer.json")

    @cached_property
    def hf(self) -> PreTrainedTokenizerFast:
        """Refused."""
        raise self.refusal("there is none of transformers'")

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """None that are known."""
        return frozenset()

    @cached_property
    def bytes_table(self) -> TokenBytes | None:
        """None."""
        return None

    def token_bytes(self) -> list[bytes]:
        raise self.refusal("structured outputs can't be had")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise self.refusal("texts can't be encoded", "send token ids")

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        raise self.refusal("texts can't be encoded", "send token ids")

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        raise self.refusal("token ids can't be decoded")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        raise self.refusal("conversations can't be encoded", "send token ids")


def _encoding_error(*texts: str) -> RequestError:
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return RequestError(
                f"text can't be tokenized: character {error.start} is the lone surrogate "
                f"{text[error.start]!r}; send valid Unicode"
            )
    return RequestError(f"text can't be tokenized: expected str, got {texts!r:.80}")


def has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Whether a model comes with a tokenizer of its own."""
    if checkpoint.gguf_metadata is not None:
        return "tokenizer.ggml.tokens" in checkpoint.gguf_metadata
    return any((checkpoint.path / file).exists() for file in _TOKENIZER_FILES)


def load_tokenizer(
    checkpoint: Checkpoint | str,
    *,
    tokenizer: str | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        checkpoint: an open one, or what ``open_checkpoint`` takes.
        tokenizer: take it from this folder, GGUF file or hub id instead.
        chat_template: use this one instead of the model's: Jinja source, or the path of a file.

    Raises:
        ModelLoadError: if there is no tokenizer, or it is damaged or of an unsupported kind.
    """
    if isinstance(checkpoint, str):
        with open_checkpoint(checkpoint) as opened:
            return load_tokenizer(opened, tokenizer=tokenizer, chat_template=chat_template)
    template = None if chat_template is None else _read_chat_template(chat_template)
    eos_token_ids = _eos_token_ids(checkpoint.config, checkpoint.generation_config)
    if tokenizer is not None:
        return _load_other(tokenizer, template, eos_token_ids)
    if checkpoint.gguf_metadata is not None:
        return _from_gguf(checkpoint.name, checkpoint.gguf_metadata, template, eos_token_ids)
    return _from_folder(checkpoint.name, checkpoint.path, template, eos_token_ids)


def _load_other(name: str, chat_template: str | None, eos_token_ids: Sequence[int]) -> Tokenizer:
    path = locate_model(name, hub_patterns=TOKENIZER_PATTERNS)
    if path.suffix == ".gguf":
        metadata = read_gguf_header(path).metadata
        return _from_gguf(name, metadata, chat_template, eos_token_ids)
    return _from_folder(name, path, chat_template, eos_token_ids)


def _read_chat_template(chat_template: str) -> str:
    if "{" in chat_template:
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(
            f"can't read chat template {chat_template!r}: {error}; "
            "give the path of a file, or Jinja source"
        ) from error


def _eos_token_ids(*configs: Mapping[str, Any]) -> list[int]:
    token_ids: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        token_ids.extend(value if isinstance(value, list) else [] if value is None else [value])
    return token_ids


def _from_gguf(
    name: str,
    metadata: Mapping[str, Any],
    chat_template: str | None,
    eos_token_ids: Sequence[int],
) -> Tokenizer:
    backend = build_tokenizer(metadata, name)
    roles = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    special_tokens = {
        role: token for key, role in roles.items() if (token := special_token(metadata, key))
    }
    return Tokenizer(
        name,
        backend,
        special_tokens=special_tokens,
        chat_template=chat_template or metadata.get("tokenizer.chat_template"),
        eos_token_ids=eos_token_ids,
    )


def _from_folder(
    name: str, folder: Path, chat_template: str | None, eos_token_ids: Sequence[int]
) -> Tokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any((folder / file).exists() for file in _TOKENIZER_FILES):
        raise ModelLoadError(
            f"model {name!r} has no tokenizer.json; add it, or set model.tokenizer to a folder, "
            "GGUF file or hub id that has one"
        )
    try:
        hf = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # the library raises whatever its parsers raise
        raise ModelLoadError(f"can't load the tokenizer of {name!r}: {error}") from error
    if not isinstance(hf, PreTrainedTokenizerFast):
        raise ModelLoadError(
            f"tokenizer of {name!r} is a {type(hf).__name__}, written in Python; only those with a "
            "tokenizer.json are supported (save_pretrained of a fast tokenizer writes it)"
        )
    return Tokenizer(
        name,
        hf.backend_tokenizer,
        special_tokens=_string_tokens(hf.special_tokens_map),
        chat_template=chat_template or _default_template(hf.chat_template),
        eos_token_ids=eos_token_ids,
        hf=hf,
    )


def _string_tokens(special_tokens: Mapping[str, Any]) -> dict[str, str]:
    return {role: token for role, token in special_tokens.items() if isinstance(token, str)}


def _default_template(chat_template: str | Mapping[str, str] | None) -> str | None:
    if chat_template is None or isinstance(chat_template, str):
        return chat_template
    return chat_template.get("default")
