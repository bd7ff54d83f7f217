"""Continue a prompt, one token at a time, with a key/value cache. For one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from internsp.model_zoo.common import CausalLM
from internsp.sp import DistributedAttention, SequenceLayout


@torch.no_grad()
def generate(
    model: CausalLM,
    prompt_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    stop_id: int | None = None,
) -> Tensor:
    """Append up to ``max_new_tokens`` tokens to each prompt; see :func:`stream`.

    Args:
        prompt_ids: ``[B, n]`` or ``[n]`` int64, ``n >= 1``.

    Returns:
        Prompt and continuation, ``[B, n + new]`` or ``[n + new]``.
    """
    ids = prompt_ids if prompt_ids.dim() == 2 else prompt_ids[None]
    options = temperature, top_k, top_p, generator, stop_id
    whole = torch.cat((ids, *stream(model, ids, max_new_tokens, *options)), dim=1)
    return whole if prompt_ids.dim() == 2 else whole[0]


def stream(
    model: CausalLM,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    stop_id: int | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of every sequence, ``[B, 1]``, as soon as it is sampled.

    Keys and values are cached, so that the forward of a token computes that token only. The model
    is in evaluation mode while the iterator exists, and must not be used by others.

    Args:
        ids: ``[B, n]`` int64, ``n >= 1``: prompts of one length.
        temperature: 0 takes the most likely token and samples nothing.
        top_k: sample among the ``top_k`` most likely tokens only.
        top_p: sample among the most likely tokens that together have this probability (nucleus
            sampling, arXiv 1904.09751); applied after ``top_k``.
        generator: makes sampling deterministic, in fp32 on the generator's device.
        stop_id: stop when every sequence has produced it; a sequence repeats it from then on.

    Raises:
        ValueError: an empty prompt, a negative temperature, ``top_k`` below 1, ``top_p`` outside
            0 to 1.
    """
    if ids.shape[-1] == 0:
        raise ValueError("generate needs a prompt of at least one token")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature {temperature} must be >= 0 and top_k {top_k} >= 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} must be above 0 and at most 1")
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), cached(model):
            done = torch.zeros(ids.shape[0], 1, dtype=torch.bool, device=ids.device)
            new, start = ids, 0
            for _ in range(max_new_tokens):
                logits = model(new, last_only=True, start=start)[:, -1]
                start += new.shape[1]
                new = _sample(logits, temperature, top_k, top_p, generator).to(ids.device)
                if stop_id is not None:
                    new = new.masked_fill(done, stop_id)
                    done = done | (new == stop_id)
                yield new
                if stop_id is not None and bool(done.all()):
                    break
    finally:
        model.train(training)


class CachedAttention(DistributedAttention):
    """Replaces a block's ``attend`` during generation, and caches keys and values.

    A full cache doubles its size, so that keys and values are rarely copied.
    """

    def __init__(self, attend: DistributedAttention) -> None:
        super().__init__(attend.heads, attend.kv_heads, attend.head_dim, scale=attend.scale)
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def start(  # type: ignore[override]
        self, x: Tensor, role: str, layout: SequenceLayout | None = None
    ) -> Tensor:
        """``x`` itself: on one process nothing is exchanged."""
        return x

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout | None = None
    ) -> Tensor:
        """``q``: ``[B, s, heads, d]`` of the new tokens; returns the same shape."""
        begin, self.length = self.length, self.length + k.shape[1]
        self.keys, self.values = (
            self._append(self.keys, k, begin),
            self._append(self.values, v, begin),
        )
        keys, values = (kept[:, : self.length].transpose(1, 2) for kept in (self.keys, self.values))
        # The i-th new token sees all cached tokens and the new tokens up to itself.
        mask = None
        if q.shape[1] > 1:
            seen = torch.ones(q.shape[1], self.length, dtype=torch.bool, device=q.device)
            mask = seen.tril(begin)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, mask, scale=self.scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    def _append(self, before: Tensor | None, new: Tensor, begin: int) -> Tensor:
        if before is None or before.shape[1] < self.length:
            size = max(2 * begin, self.length)
            made = new.new_empty(new.shape[0], size, *new.shape[2:])
            if before is not None:
                made[:, :begin] = before[:, :begin]
            before = made
        before[:, begin : self.length] = new
        return before


@contextmanager
def cached(model: CausalLM) -> Iterator[None]:
    """Context in which every block's attention caches keys and values.

    Each forward takes the next tokens, and as ``start`` the number of tokens before them.
    """
    blocks: list[Any] = [block.attention for block in model.layers]
    before = [attention.attend for attention in blocks]
    try:
        for attention in blocks:
            attention.attend = CachedAttention(attention.attend)
        yield
    finally:
        for attention, attend in zip(blocks, before, strict=True):
            attention.attend = attend


def _sample(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Sample one token for each row: ``[B, vocabulary]`` to ``[B, 1]``."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    wide = logits.to(generator.device if generator else logits.device, torch.float32) / temperature
    if top_k is None and top_p is None:
        return torch.multinomial(wide.softmax(dim=-1), 1, generator=generator)
    best, tokens = wide.topk(min(top_k or wide.shape[-1], wide.shape[-1]), dim=-1)
    chances = best.softmax(dim=-1)
    if top_p is not None:  # the most likely token always stays
        chances = chances.masked_fill(chances.cumsum(dim=-1) - chances >= top_p, 0.0)
    return tokens.gather(1, torch.multinomial(chances, 1, generator=generator))
