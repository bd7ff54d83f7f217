"""Chats: token ids from the tokenizer's chat template, and which tokens count.

Only the assistant's tokens count in the loss: its messages and the ends of its turns. If the
template marks them (``{% generation %}``), the marks are used. Otherwise a message's tokens are
those that the template adds to the generation prompt before it; a template that changes the text of
earlier messages is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from internsp.app.config import DocumentsConfig
from internsp.app.data.documents import read_rows
from internsp.app.data.tokenizer import (
    LibraryTokenizer,
    Tokenizer,
    Tokens,
    required,
    smallest_dtype,
)
from internsp.errors import ConfigError

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the same expression as in transformers
Message = Mapping[str, Any]


def conversations(
    given: DocumentsConfig, tokenizer: Tokenizer, path: Path
) -> Iterator[tuple[Tokens, bool]]:
    """One document for each row of a path, in order, as marked ids (:func:`marked`).

    Rows without a token that counts are left out: nothing could be learned from them.

    Raises:
        ConfigError: the tokenizer has no chat template, a row is no conversation, or the template
            refuses it; names the file and the row.
    """
    template = _Template(tokenizer)
    dtype = smallest_dtype(2 * tokenizer.vocab_size)
    for where, value in read_rows(given, path):
        ids, counts = template.apply(_checked(value, given.messages_field, where), where)
        if any(counts):
            yield marked(ids, counts).astype(dtype), True


def marked(ids: Sequence[int], counts: Sequence[int]) -> Tokens:
    """Encode each id and whether it counts in one number: twice the id, plus one if it counts."""
    return np.asarray(ids, np.int64) * 2 + np.asarray(counts, np.int64)


def _checked(messages: Any, field: str, where: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f"data.messages_field: {where} has no list of messages {field!r}, but "
            f"{type(messages).__name__}"
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"data.messages_field: {where}: message {number} has no text 'role'")
    return messages


class _Template:
    """The chat template of a tokenizer, which may have none: an error."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        text = None
        if isinstance(tokenizer, LibraryTokenizer) and tokenizer.is_folder:
            self._name, self._own = tokenizer.path, tokenizer.own
            with suppress(ValueError):  # raised if there are several templates and no default
                text = self._own.get_chat_template()
        if text is None:
            raise ConfigError(
                'data.format: "chat" needs the chat template of a tokenizer, and data.tokenizer '
                "has none: give a folder that transformers reads, with chat_template.jinja"
            )
        self._text, self._marks = text, bool(_MARKED.search(text))

    def apply(self, messages: list[Message], where: str) -> tuple[list[int], list[int]]:
        """Token ids of a conversation, and for each id 1 if it counts, else 0."""
        try:
            return self._by_marks(messages) if self._marks else self._by_appending(messages, where)
        except ConfigError:
            raise
        except Exception as error:  # a template can raise any error, of jinja2 or its own
            raise ConfigError(
                f"data.format: {where}: the chat template of {self._name!r} refuses it: {error}"
            ) from error

    def _by_marks(self, messages: list[Message]) -> tuple[list[int], list[int]]:
        """Like ``apply_chat_template(return_assistant_tokens_mask=True)``, which however counts all
        later tokens if a mark ends with a character that is in no token, such as a space."""
        library = required("transformers.utils.chat_template_utils", "a chat template")
        (text,), (spans,) = library.render_jinja_template(
            conversations=[messages],
            chat_template=self._text,
            return_assistant_tokens_mask=True,
            **self._own.special_tokens_map,
        )
        found = self._own(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        counts = [
            int(any(a < end and b > begin for begin, end in spans))
            for a, b in found["offset_mapping"]
        ]
        return list(found["input_ids"]), counts

    def _by_appending(self, messages: list[Message], where: str) -> tuple[list[int], list[int]]:
        ids = self._ids(messages)
        counts = [0] * len(ids)
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._ids(messages[:at], add_generation_prompt=True) if at else []
            after = self._ids(messages[: at + 1])
            if after[: len(before)] != before or ids[: len(after)] != after:
                raise ConfigError(
                    f"data.format: {where}: the chat template of {self._name!r} does not append "
                    f"message {at + 1} to those before it, so that its tokens are not known: mark "
                    "them in the template by {% generation %} and {% endgeneration %}"
                )
            counts[len(before) : len(after)] = [1] * (len(after) - len(before))
        return ids, counts

    def _ids(self, messages: list[Message], **options: Any) -> list[int]:
        found = self._own.apply_chat_template(messages, return_dict=True, **options)
        ids: list[int] = list(found["input_ids"])
        return ids
