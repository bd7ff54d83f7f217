"""Dropout whose masks depend only on the seed, the row of the data and the token's position.

A mask is a function of (``train.seed``, the row's index in the order of the data, the position in
the row, the block, the dropout's index within the block, the channel) and of nothing else: not of
the mesh, the micro-batch, the rank or earlier random numbers. So a step drops the same elements on
every mesh, a recomputed block drops them again, and a resumed run has no random state to restore. A
row's index is never used twice in a run, so that no step repeats another's masks.

The random numbers are a tree of keys. Each level computes 64-bit keys from the keys above it and a
counter with the generator SplitMix64 (Steele, Lea, Flood 2014), evaluated at the counter:
``mixed(key + counter * GAMMA)``. The arithmetic is that of int64 tensors, which wraps, so that the
bits are the same on every device and under a compiler. Each word of the last level has the random
numbers of four channels, 16 bits each.

Attention's probabilities are not dropped: its kernels draw their own masks, which depend on how
heads and positions are sharded.
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
"""Number of values of a channel's random number; ``share`` is rounded to that many steps."""
_LANES = 4  # channels' random numbers in a word
_SITE_STRIDE = 1 << 32  # counters of one dropout within a block


def row_keys(seed: int, rows: Sequence[int]) -> Tensor:
    """A random key for each row.

    Args:
        seed: of the run, below ``2**63``.
        rows: ``[B]`` indices of the rows in the order of the data, at least 0.

    Returns:
        ``[B]`` int64, on the CPU.
    """
    run = _mixed(torch.tensor([seed], dtype=torch.int64) + _signed(_GAMMA))
    return _words(run, torch.tensor(rows, dtype=torch.int64))


def token_keys(rows: Tensor, index: Tensor) -> Tensor:
    """A random key for each token: ``[B, s]`` int64.

    Args:
        rows: ``[B]``, keys of the rows.
        index: ``[s]`` int64, positions counted from the start of a row, not of a document.
    """
    return _words(rows[:, None], index)


def block_keys(tokens: Tensor, number: int) -> Tensor:
    """A random key for each token in one block, ``[B, s]`` int64; ``number`` 0 is the embedding."""
    return _mixed(tokens + _signed((number + 1) * _GAMMA))


def dropout_mask(keys: Tensor, site: int, channels: int, share: float) -> Tensor:
    """The elements that are dropped, as a mask ``[B, s, channels]`` bool.

    Args:
        keys: ``[B, s]``, of the block (:func:`block_keys`).
        site: index of the dropout within the block, from 0.
        share: of the elements to drop, above 0 and below 1; see :func:`steps_of`.
    """
    counters = torch.arange(-(-channels // _LANES), device=keys.device)
    # Equals `key + counter * GAMMA`. But inductor multiplies constants, and the index expression of
    # an arange, without wrapping: only values read from memory may be multiplied by large factors.
    first = keys * _signed(_INVERSE) + (site * _SITE_STRIDE + 1)
    words = (first[..., None] + counters).mul_(_signed(_GAMMA))
    # Read each word as four random numbers: int16, from -32768 on.
    numbers = _mixed(words).view(torch.int16)
    return numbers[..., :channels] < steps_of(share) - _STEPS // 2


def steps_of(share: float) -> int:
    """``share`` in 65,536ths, rounded, from 1 to 65,535."""
    return min(max(round(share * _STEPS), 1), _STEPS - 1)


class Dropout(nn.Module):
    """Zeroes a share of the elements in training and scales the others, keeping the mean.

    Args:
        share: of the elements, at least 0 and below 1; 0: no dropout.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.scale = _STEPS / (_STEPS - steps_of(share)) if share else 1.0

    def forward(self, x: Tensor, keys: Tensor | None, site: int = 0) -> Tensor:
        """``[B, s, channels]`` to the same shape. Saves one byte an element for backward.

        Args:
            keys: ``[B, s]``, of the block (:func:`block_keys`); unused without dropout.
            site: index of this dropout within the block.

        Raises:
            LayoutError: keys are missing, or their shape differs from that of the tokens.
        """
        if not self.share or not self.training:
            return x
        if keys is None or keys.shape != x.shape[:-1]:
            found = "none" if keys is None else f"those of {tuple(keys.shape)}"
            raise LayoutError(
                f"dropout of {tuple(x.shape)} needs the keys of {tuple(x.shape[:-1])} tokens, and "
                f"was given {found}: see internsp.layers.dropout"
            )
        mask = dropout_mask(keys, site, x.shape[-1], self.share)
        return (x * self.scale).masked_fill(mask, 0.0)

    def extra_repr(self) -> str:
        """The share, for ``repr``."""
        return f"{self.share}"


def _words(keys: Tensor, counters: Tensor) -> Tensor:
    """For each key and counter (from 0), that word of the key's random sequence."""
    return _mixed(keys + (counters + 1) * _signed(_GAMMA))


def _mixed(words: Tensor) -> Tensor:
    """SplitMix64's bijective mixing of each 64-bit word; in place."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        words ^= _shifted(words, shift)
        words *= _signed(factor)
    words ^= _shifted(words, 31)
    return words


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Logical right shift: that of int64 is arithmetic, and would shift in copies of the sign."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the low 64 bits of ``word``."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
