"""Dotted config paths: which exist, what they are called in other places, which one was meant."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Path = tuple[str, ...]

ALIASES = {
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
    "chat_template": "model.chat_template",
    "block_size": "cache.block_size",
    "kv_cache_memory_gb": "cache.memory_gb",
    "enable_prefix_caching": "cache.enable_prefix_caching",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "long_prefill_token_threshold": "scheduler.long_prefill_token_threshold",
    "logits_processors": "sampler.logits_processors",
    "safe_mode": "plugins.safe_mode",
    "host": "server.host",
    "port": "server.port",
    "workers": "server.workers",
    "served_model_name": "server.served_model_name",
}
"""Names that people know from other engines, for flags and keyword arguments."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a dotted name points at.

    Attributes:
        path: canonical keys from the root.
        field: the field, or None for one key of a plugin's options.
        section: the section itself where the name is a section's; ``path`` then is the field that
            a plain text sets.
    """

    path: Path
    field: FieldInfo | None
    section: Path | None = None


@dataclass(frozen=True, slots=True)
class Paths:
    """Every path of a settings model.

    Attributes:
        leaves: field by dotted path; ``<section>.options`` is a leaf.
        sections: model by dotted path.
    """

    leaves: dict[str, FieldInfo]
    sections: dict[str, type[BaseModel]]

    @classmethod
    def of(cls, model: type[BaseModel]) -> Paths:
        """The paths of this model, computed once."""
        return _paths_of(model)

    def shorthand(self, section: str) -> str | None:
        """The field that a plain text given for this section sets, as dotted path.

        ``scheduler: priority`` sets ``scheduler.name``; ``model: some/folder`` sets ``model.path``.
        """
        candidates = [f"{section}.{key}" for key in ("path", "name")]
        return next((path for path in candidates if path in self.leaves), None)

    def components(self) -> Iterable[Path]:
        """The sections that select a plugin: those with ``name`` and ``options``."""
        for section in self.sections:
            if f"{section}.name" in self.leaves and f"{section}.options" in self.leaves:
                yield tuple(section.split("."))

    def find(self, dotted: str, *, aliases: bool = True) -> Target | None:
        """Resolve a dotted snake_case name; None if there is no such path."""
        dotted = ALIASES.get(dotted, dotted) if aliases else dotted
        if dotted in self.leaves:
            return Target(tuple(dotted.split(".")), self.leaves[dotted])
        if dotted in self.sections and (short := self.shorthand(dotted)):
            section = tuple(dotted.split("."))
            return Target(tuple(short.split(".")), self.leaves[short], section)
        parent, _, key = dotted.rpartition(".")
        if key and parent in self.leaves and parent.endswith("options"):
            return Target((*parent.split("."), key), None)
        return None

    def names(self, *, aliases: bool = True) -> list[str]:
        """Every dotted name that ``find`` knows, option keys aside."""
        short = [section for section in self.sections if self.shorthand(section)]
        return [*self.leaves, *short, *(ALIASES if aliases else ())]


@functools.cache
def _paths_of(model: type[BaseModel]) -> Paths:
    leaves: dict[str, FieldInfo] = {}
    sections: dict[str, type[BaseModel]] = {}

    def walk(parent: type[BaseModel], prefix: str) -> None:
        for key, field in parent.model_fields.items():
            path = f"{prefix}{key}"
            annotation = field.annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                sections[path] = annotation
                walk(annotation, f"{path}.")
            else:
                leaves[path] = field

    walk(model, "")
    return Paths(leaves, sections)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest known name, or nothing if none is close."""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
