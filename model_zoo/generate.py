"""Continue a prompt, one token at a time. For samples, not for serving: nothing is cached."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop_id: int | None = None,
) -> Tensor:
    """Append up to ``max_new_tokens`` tokens to each prompt.

    Every token takes a forward over the whole sequence, so the work grows with the square of its
    length. Meant for one process and the plain model.

    Args:
        prompt_ids: ``[B, n]`` or ``[n]`` int64, ``n >= 1``.
        temperature: 0 takes the most likely token and draws nothing.
        top_k: draw among the ``top_k`` most likely tokens only.
        generator: makes the draw deterministic; drawn on its device, fp32 on any.
        stop_id: stop once every sequence has produced it; after it a sequence repeats it.

    Returns:
        Prompt and continuation, ``[B, n + new]`` or ``[n + new]``.

    Raises:
        ValueError: an empty prompt, a negative temperature or ``top_k`` below 1.
    """
    if prompt_ids.shape[-1] == 0:
        raise ValueError("generate needs a prompt of at least one token")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature {temperature} must be >= 0 and top_k {top_k} >= 1")
    training = model.training
    model.eval()
    try:
        ids = prompt_ids if prompt_ids.dim() == 2 else prompt_ids[None]
        done = torch.zeros(ids.shape[0], 1, dtype=torch.bool, device=ids.device)
        for _ in range(max_new_tokens):
            logits = model(ids, last_only=True)[:, -1]
            token = _choose(logits, temperature, top_k, generator).to(ids.device)
            if stop_id is not None:
                token = token.masked_fill(done, stop_id)
                done = done | (token == stop_id)
            ids = torch.cat((ids, token), dim=1)
            if stop_id is not None and bool(done.all()):
                break
    finally:
        model.train(training)
    return ids if prompt_ids.dim() == 2 else ids[0]


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token a row: ``[B, vocabulary]`` to ``[B, 1]``."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    wide = logits.to(generator.device if generator else logits.device, torch.float32) / temperature
    if top_k is None:
        return torch.multinomial(wide.softmax(dim=-1), 1, generator=generator)
    best, tokens = wide.topk(min(top_k, wide.shape[-1]), dim=-1)
    drawn = torch.multinomial(best.softmax(dim=-1), 1, generator=generator)
    return tokens.gather(1, drawn)
