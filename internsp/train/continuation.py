"""``internsp generate``: a run's newest checkpoint, of whatever mesh, continues a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from internsp.config import Config
from internsp.config.resume import readable
from internsp.data.tokenizer import Tokenizer, load_tokenizer
from internsp.errors import ConfigError
from internsp.factory import Model, build_to_load, device_type, generate
from internsp.train.export import newest, read_tensor

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a character ends of which bytes are missing


def load_run(run: Path) -> tuple[Model, Config, list[str]]:
    """The whole model of a run's newest checkpoint (or of a checkpoint's folder), on the CPU.

    Returns:
        The model, the run's configuration, and what the user should read.

    Raises:
        ConfigError: there is no whole checkpoint, or not the one of a configured model.
    """
    folder, content, notes = newest(run)
    config = Config.model_validate(readable(content.config))
    if config.model.family == "hf" and not Path(str(config.model.path)).is_dir():
        raise ConfigError(f"{folder} was trained from {config.model.path}, which is not there")
    model = build_to_load(config)
    saved = {name for name in content.tensors if name.startswith("model.")}
    weights = {n.removeprefix("model."): read_tensor(folder, content, n) for n in sorted(saved)}
    shapes = {n: v.shape for n, v in model.state_dict().items()}
    wrong = [n for n, v in weights.items() if n in shapes and v.shape != shapes[n]]
    missing = model.load_state_dict(
        {n: v for n, v in weights.items() if n not in wrong}, assign=True, strict=False
    )
    shared = {n for n, _ in model.named_parameters(remove_duplicate=False)} - {
        n for n, _ in model.named_parameters()
    }
    if lost := [*wrong, *(set(missing.missing_keys) - shared), *missing.unexpected_keys]:
        raise ConfigError(
            f"{folder} is of another model than its [model] describes ({min(lost)}): a program "
            "gave its own, which only it can build"
        )
    return model, config, [*notes, f"{folder} (step {content.step})"]


def continuation(
    run: Path,
    prompt: str,
    tokens: int,
    told: Callable[[str], None],
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    device: str | None = None,
) -> str:
    """Continue ``prompt`` by at most ``tokens`` tokens; blocks.

    Args:
        told: called with the prompt, then with each piece of text as soon as it is whole: a
            character may take several tokens.
        device: ``None``: as the run's configuration says.

    Returns:
        Prompt and continuation.

    Raises:
        ConfigError: see :func:`load_run`; or the text has a token that the model lacks.
    """
    model, config, _ = load_run(run)
    tokenizer = load_tokenizer(config.data.tokenizer)
    model.to(device_type(config) if device is None else device)
    where = next(model.parameters()).device
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_document]
    text = _Text(tokenizer, ids if prompt else [], told)
    told(prompt)
    generate(
        model, torch.tensor(ids, dtype=torch.int64, device=where), tokens,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        stop_id=tokenizer.end_of_document, told=text.add,
    )  # fmt: skip
    return prompt + text.finish()


class _Text:
    """Tokens as text, given on in whole characters."""

    def __init__(
        self, tokenizer: Tokenizer, before: list[int], told: Callable[[str], None]
    ) -> None:
        self._tokenizer, self._told = tokenizer, told
        self._ids = list(before)  # a token may be spelled by what stands before it
        self._prompt = tokenizer.decode(before) if before else ""
        self._given = ""

    def add(self, token: int) -> None:
        """One more; the end of a document is not text."""
        if token == self._tokenizer.end_of_document:
            return
        self._ids.append(token)
        text = self._text()
        if not text.endswith(_UNFINISHED):
            self._give(text)

    def finish(self) -> str:
        """Give what is left, whole or not; all that was given."""
        self._give(self._text())
        return self._given

    def _text(self) -> str:
        text = self._tokenizer.decode(self._ids)
        return text[len(self._prompt) :]

    def _give(self, text: str) -> None:
        if more := text[len(self._given) :]:
            self._given = text
            self._told(more)
