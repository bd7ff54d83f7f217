"""Chats: the template's own tokens; only the assistant's tokens are labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from internsp.app.config import DataConfig, load_config
from internsp.app.data import tokens
from internsp.app.data.batches import DataSource
from internsp.app.data.order import Row
from internsp.app.data.tokenizer import load_tokenizer
from internsp.errors import ConfigError
from internsp.sp import SequenceLayout

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

WORDS = [
    "<unk>", "<end>", "<s>", "user", "assistant", "system", "hi", "there", "how", "are", "you",
    "fine", "thanks", "be", "kind", "1", "2", "3",
]  # fmt: skip
PLAIN = (
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
MARKED = (
    "{% for m in messages %}<s> {{ m['role'] }} {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }} <end> {% endgeneration %}{% else %}{{ m['content'] }} "
    "<end> {% endif %}{% endfor %}{% if add_generation_prompt %}<s> assistant {% endif %}"
)
# Drops the assistant's earlier turns, like templates of reasoning models.
FORGETS = (
    "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}<s> {{ m['role'] }} "
    "{{ m['content'] }} <end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine thanks"},
]
TEXT = (
    "<s> system be kind <end> <s> user hi there <end> <s> assistant hi <end> "
    "<s> user how are you <end> <s> assistant fine thanks <end>"
)
COUNTS = ["hi", "<end>", "fine", "thanks", "<end>"]


def tokenizer_folder(folder: Path, template: str | None = PLAIN) -> Path:
    """A tokenizer of words, in transformers' format."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'data' is not installed")
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    own = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<end>")
    own.chat_template = template
    own.save_pretrained(str(folder / "tokenizer"))
    return folder / "tokenizer"


def source(folder: Path, rows: list[dict[str, Any]], **changes: object) -> DataSource:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "source": "jsonl", "paths": [str(folder / "rows.jsonl")], "format": "chat", "pack": False,
        "tokenizer": str(folder / "tokenizer"), "sequence_length": 40, "held_out": 0.0, **changes,
    }  # fmt: skip
    return DataSource(DataConfig.model_validate(settings), global_batch=1)


def said(row: Row) -> tuple[list[str], list[str]]:
    """The words of a padded row, and those that are labels."""
    words = [WORDS[int(n)] for n in row.ids]
    out = {n for begin, end in row.ignored for n in range(begin, end)}
    length = row.ignored[-1][0] if row.ignored and row.ignored[-1][1] == len(words) else len(words)
    return words[:length], [words[n] for n in range(length) if n not in out]


@pytest.mark.parametrize("least", [0, 1 << 20], ids=["on disk", "in memory"])
@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["appended", "marked"])
def test_a_chat_is_what_its_template_says_and_the_assistants_words_count(
    template: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer_folder(tmp_path, template)
    monkeypatch.setattr(tokens, "CACHED_BYTES", least)
    made = source(tmp_path, [{"messages": CHAT}])
    row = made.row(0)
    assert said(row) == (TEXT.split(), COUNTS)
    # Exactly those are labels in a layout, sharded over ranks or not.
    ids, out = torch.from_numpy(row.ids)[None], [row.ignored]
    layouts = [SequenceLayout.create(ids, rank=r, size=3, ignored=out) for r in range(3)]
    labels = torch.cat([layout.labels for layout in layouts], 1)[0].tolist()
    assert [WORDS[n] for n in labels if n != -100] == COUNTS
    assert {layout.total_valid_tokens for layout in layouts} == {len(COUNTS)}
    assert made.tokens_of_a_sequence == len(COUNTS)


def test_the_command_takes_the_folder_of_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    data = {"source": "jsonl", "paths": [str(tmp_path / "rows.jsonl")], "format": "chat",
            "tokenizer": str(tokenizer_folder(tmp_path))}  # fmt: skip
    assert load_config({"data": data}, world_size=1).data.tokenizer == data["tokenizer"]
    with pytest.raises(ConfigError, match=r"data\.tokenizer: neither a file nor a fol"):
        load_config({"data": {"tokenizer": "/dev/null"}}, world_size=1)


def test_chats_are_packed_and_mixed_with_text_and_each_text_counts_as_it_should(
    tmp_path: Path,
) -> None:
    tokenizer_folder(tmp_path)
    (tmp_path / "plain.txt").write_text("1 2 3 " * 40)
    chats = [{"messages": CHAT[1:3]}, {"messages": CHAT[3:]}] * 5
    tables = [
        {"name": "chat", "source": "jsonl", "paths": [str(tmp_path / "rows.jsonl")],
         "format": "chat"},
        {"name": "plain", "source": "text", "paths": [str(tmp_path / "plain.txt")]},
    ]  # fmt: skip
    made = source(tmp_path, chats, mixture=tables, source="stdlib", paths=[], format="text",
                  pack=True, sequence_length=30)  # fmt: skip
    for number in range(12):
        row = made.row(number)
        words = [WORDS[int(n)] for n in row.ids]
        out = {n for begin, end in row.ignored for n in range(begin, end)}
        counted = {words[n] for n in range(30) if n not in out}
        if "1" in words:
            assert out == set()
        else:
            assert row.starts is not None
            assert len(row.starts) > 1
            assert counted <= set(COUNTS)
            assert words[0] != "<s>" or 0 in out


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ([{"messages": CHAT}], None, "needs the chat template of a tokenizer"),
        ([{"messages": CHAT}], FORGETS, "row 1: the chat template .* does not append message 3"),
        ([{"messages": CHAT}], "{{ raise_exception('no system') }}", "row 1: .*refuses.*no system"),
        ([{"messages": CHAT}, {"messages": "hi"}], PLAIN, "row 2 has no list of messages"),
        ([{"messages": []}], PLAIN, "row 1 has no list of messages"),
        ([{"text": "hi"}], PLAIN, r"row 1 has no 'messages'; it has \['text'\]"),
        ([{"messages": [{"content": "hi"}]}], PLAIN, "row 1: message 1 has no text 'role'"),
        ([{"messages": CHAT[:2]}], PLAIN, "in which the assistant says anything"),
    ],
)
def test_mistakes_name_the_row_and_the_remedy(
    rows: list[dict[str, Any]], template: str | None, message: str, tmp_path: Path
) -> None:
    tokenizer_folder(tmp_path, template)
    with pytest.raises(ConfigError, match=message):
        source(tmp_path, rows)


def test_a_folders_tokenizer_gives_ids_and_text_and_is_known_again(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder(tmp_path)))
    assert tokenizer.encode("how are you") == [8, 9, 10]
    assert tokenizer.decode([8, 9, 1]) == "how are"
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (1, len(WORDS))
    before = tokenizer.fingerprint()
    file = tmp_path / "tokenizer" / "chat_template.jinja"
    file.write_text(MARKED)
    assert load_tokenizer(tokenizer.path).fingerprint() != before
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is not a tokenizer's folder"):
        load_tokenizer(str(tmp_path / "empty"))
