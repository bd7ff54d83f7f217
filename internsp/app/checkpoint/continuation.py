"""``internsp generate``: continue a text with the model of a run's newest checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from internsp.app.checkpoint.export import newest
from internsp.app.checkpoint.files import Reader
from internsp.app.config import Config
from internsp.app.data.tokenizer import load_tokenizer
from internsp.app.models.factory import Model, build, device_type, generate
from internsp.app.process.terminal import write_lines
from internsp.errors import ConfigError


def load_run(run: Path) -> tuple[Model, Config]:
    """Load the full model of a run's newest checkpoint (or of a checkpoint's folder) on the CPU.

    On the standard error it says which checkpoints were passed over, and why.

    Returns:
        The model, and the run's configuration.

    Raises:
        ConfigError: there is no complete checkpoint, or it is of a model that is not configured.
    """
    folder, content, config, notes = newest(run)
    if notes:  # not within the text, which is the command's output
        write_lines("\n".join(notes), sys.stderr)
    model = build(config, "cpu")
    saved = {name for name in content.tensors if name.startswith("model.")}
    reader = Reader(folder, content)
    weights = {n.removeprefix("model."): reader.whole(n) for n in sorted(saved)}
    tied: dict[int, list[str]] = {}  # a checkpoint has a tied weight once
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    for names in tied.values():
        if held := [name for name in names if name in weights]:
            weights |= dict.fromkeys(names, weights[held[0]])
    shapes = {n: v.shape for n, v in model.state_dict().items()}
    wrong = [n for n, v in weights.items() if n in shapes and v.shape != shapes[n]]
    missing = model.load_state_dict(
        {n: v for n, v in weights.items() if n not in wrong}, assign=True, strict=False
    )
    if lost := [*wrong, *missing.missing_keys, *missing.unexpected_keys]:
        raise ConfigError(
            f"{folder} has another model than its [model] describes ({min(lost)}): it was trained "
            "by a program with a model of its own, which only that program can build"
        )
    return model, config


def continuation(
    run: Path,
    prompt: str,
    tokens: int,
    *,
    seed: int,
    device: str | None = None,
    **options: Any,
) -> str:
    """Continue ``prompt`` by at most ``tokens`` tokens; blocks.

    Args:
        device: ``None``: the device of the run's configuration.
        options: sampling options ``temperature``, ``top_k`` and ``top_p``.

    Returns:
        Prompt and continuation.

    Raises:
        ConfigError: see :func:`load_run`; or the text is none, or has a token that the model lacks;
            or the machine has no such device.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # a terminal's bytes that are not UTF-8
        raise ConfigError(
            f"--prompt: character {error.start + 1} is not UTF-8: give the text as UTF-8"
        ) from None
    model, config = load_run(run)
    tokenizer = load_tokenizer(config.data.tokenizer)
    where = device_type(config) if device is None else device
    try:
        torch.zeros(1, device=where).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--device: {where!r} cannot compute here: {reason}; give another, as cpu"
        ) from None
    model.to(where)
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_document]
    found = generate(
        model, torch.tensor(ids, dtype=torch.int64, device=where), tokens,
        seed=seed, stop_id=tokenizer.end_of_document, **options,
    )  # fmt: skip
    # Decoded together: the text of a token may depend on the tokens before it.
    return prompt + tokenizer.decode(found.tolist())[len(tokenizer.decode(ids)) :]
