"""Dropout whose masks follow from the seed, the row of the data and the token's place in it.

A mask is a function of (``train.seed``, the row's number in the order of the data, the position in
the row, the block, the place within the block, the channel) and of nothing else: neither of the
mesh, the micro-batch or the rank, nor of what was drawn before. So every cut of a step drops the
same elements, a recomputed block drops them again, and a run that goes on has no state to keep. A
row's number is never used twice in a run, so that no step repeats another's masks.

Each level makes a 64-bit word, a key, of the one above it and a counter, by the generator
SplitMix64 (Steele, Lea, Flood 2014) read at any place: ``mixed(key + counter * GAMMA)``. Its
arithmetic is that of int64 tensors, which wraps, so that the bits are the same on every device and
under a compiler. The last level's words are four channels' numbers of 16 bits each.

Attention's probabilities are not dropped: its kernels draw masks of their own, which depend on how
the heads and positions are cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from internsp.errors import LayoutError

_GAMMA = 0x9E3779B97F4A7C15
_INVERSE = pow(_GAMMA, -1, 1 << 64)
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_STEPS = 1 << 16
"""Values of a channel's number: a share is rounded to as many."""
_LANES = 4  # channels' numbers in a word
_SITE = 1 << 32  # words apart are the places within a block


def row_keys(seed: int, rows: Sequence[int]) -> Tensor:
    """A key for each row.

    Args:
        seed: of the run, below ``2**63``.
        rows: their numbers in the order of the data, not below 0; ``[B]``.

    Returns:
        ``[B]`` int64, on the CPU.
    """
    run = _mixed(torch.tensor([seed], dtype=torch.int64) + _signed(_GAMMA))
    return _counted(run, torch.tensor(rows, dtype=torch.int64))


def token_keys(rows: Tensor, index: Tensor) -> Tensor:
    """A key for each token: ``[B, s]`` int64.

    Args:
        rows: ``[B]``, keys of the rows.
        index: ``[s]`` int64, positions in the rows, whatever documents are in them.
    """
    return _counted(rows[:, None], index)


def block_keys(tokens: Tensor, number: int) -> Tensor:
    """A key for each token in one block, ``[B, s]`` int64; ``number`` 0 is the embedding."""
    return _mixed(tokens + _signed((number + 1) * _GAMMA))


def dropped(keys: Tensor, site: int, channels: int, share: float) -> Tensor:
    """Which elements are dropped, ``[B, s, channels]`` bool.

    Args:
        keys: ``[B, s]``, of a block.
        site: the place within the block, from 0.
        share: of the elements, above 0 and below 1; see :func:`steps_of`.
    """
    counters = torch.arange(-(-channels // _LANES), device=keys.device)
    # As `key + counter * GAMMA`, but inductor multiplies what it knows of an arange, and constants,
    # without wrapping: only what comes from memory may meet large factors.
    first = keys * _signed(_INVERSE) + (site * _SITE + 1)
    words = (first[..., None] + counters).mul_(_signed(_GAMMA))
    # The words of a token, read as four numbers each: int16, from -32768 on.
    numbers = _mixed(words).view(torch.int16)
    return numbers[..., :channels] < steps_of(share) - _STEPS // 2


def steps_of(share: float) -> int:
    """``share`` in 65,536ths, of which one is the least and one less than all the most."""
    return min(max(round(share * _STEPS), 1), _STEPS - 1)


class Dropout(nn.Module):
    """Zeroes a share of the elements in training and scales the others, so that the mean stays.

    Args:
        share: of the elements, from 0 to below 1; 0: nothing is dropped.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.scale = _STEPS / (_STEPS - steps_of(share)) if share else 1.0

    def forward(self, x: Tensor, keys: Tensor | None, site: int = 0) -> Tensor:
        """``[B, s, channels]`` to the same. For backward it keeps a byte an element.

        Args:
            keys: ``[B, s]``, of the block (:func:`block_keys`); unused where nothing is dropped.
            site: the place within the block.

        Raises:
            LayoutError: keys are missing, or of other tokens.
        """
        if not self.share or not self.training:
            return x
        if keys is None or keys.shape != x.shape[:-1]:
            found = "none" if keys is None else f"those of {tuple(keys.shape)}"
            raise LayoutError(
                f"dropout of {tuple(x.shape)} needs the keys of {tuple(x.shape[:-1])} tokens, and "
                f"was given {found}: see internsp.layers.dropout"
            )
        mask = dropped(keys, site, x.shape[-1], self.share)
        return (x * self.scale).masked_fill(mask, 0.0)

    def extra_repr(self) -> str:
        """The share, for ``repr``."""
        return f"{self.share}"


def _counted(keys: Tensor, counters: Tensor) -> Tensor:
    """The word of each counter, from 0, in the sequence that begins with each key."""
    return _mixed(keys + (counters + 1) * _signed(_GAMMA))


def _mixed(words: Tensor) -> Tensor:
    """Each 64-bit word's scrambled image, one to one; in place."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        words ^= _shifted(words, shift)
        words *= _signed(factor)
    words ^= _shifted(words, 31)
    return words


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left: that of int64 would bring the sign's copies."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
