"""Folds long lists for printing: a repeated part once, with its count and its numbers. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import cast

_LONGEST = 400  # items of a part that repeats
_TRIES = 24  # lengths of a repeating part that are tried at one position


@dataclass(frozen=True)
class Item:
    """An item of a list: ``key`` is equal in repetitions, ``number`` may count up or down."""

    key: Hashable
    number: int | None = None


@dataclass(frozen=True)
class Repeat:
    """``items`` repeated ``times`` times, their numbers changed by ``step`` each time."""

    items: tuple[Item, ...]
    times: int = 1
    step: int = 0

    def numbers(self, item: Item) -> list[int]:
        """The numbers of one of :attr:`items` in all repetitions, in order."""
        if item.number is None:
            return []
        return [item.number + n * self.step for n in range(self.times if self.step else 1)]


def fold(items: Sequence[Item]) -> list[Repeat]:
    """Divide ``items`` into repeated parts and single items, without loss.

    At each position, the part is chosen whose repetitions cover most items (the shortest such).
    """
    following = _next_equal(items)
    found: list[Repeat] = []
    at = 0
    while at < len(items):
        best = Repeat((items[at],))
        covered = 1
        other = following[at]
        for _ in range(_TRIES):
            if other is None or other - at > _LONGEST:
                break
            times, step = _times(items, at, other - at)
            if times > 1 and times * (other - at) > covered:
                covered = times * (other - at)
                best = Repeat(tuple(items[at:other]), times, step)
            other = following[other]
        found.append(best)
        at += covered
    return found


def _next_equal(items: Sequence[Item]) -> list[int | None]:
    """For each position, the next position with the same key; ``None``: there is none."""
    following: list[int | None] = [None] * len(items)
    last: dict[Hashable, int] = {}
    for index in range(len(items) - 1, -1, -1):
        following[index] = last.get(items[index].key)
        last[items[index].key] = index
    return following


def _times(items: Sequence[Item], start: int, length: int) -> tuple[int, int]:
    """How often the part at ``start`` is repeated in a row, and by how much its numbers change."""
    numbered = next((i for i in range(length) if items[start + i].number is not None), None)
    step = 0
    if numbered is not None:
        if start + length + numbered >= len(items):
            return 1, 0
        first, second = items[start + numbered].number, items[start + length + numbered].number
        if first is None or second is None:
            return 1, 0
        step = second - first
    times = 1
    while start + (times + 1) * length <= len(items) and all(
        _follows(items[start + i], items[start + times * length + i], times * step)
        for i in range(length)
    ):
        times += 1
    return times, step


def _follows(first: Item, other: Item, change: int) -> bool:
    if first.number is None or other.number is None:
        return first == other
    return first.key == other.key and other.number == first.number + change


def ranges(numbers: Sequence[int]) -> str:
    """``0-7, 16-23`` or ``0-56 by 8``; in the given order, up or down."""
    parts: list[str] = []
    at = 0
    while at < len(numbers):
        end = at + 1
        step = numbers[end] - numbers[at] if end < len(numbers) else 0
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step != 0:
            end += 1
        count = end - at
        if count >= 3 or (count == 2 and abs(step) == 1):
            by = "" if abs(step) == 1 else f" by {abs(step)}"
            parts.append(f"{numbers[at]}-{numbers[end - 1]}{by}")
            at = end
        else:
            parts.append(str(numbers[at]))
            at += 1
    return ", ".join(parts)


def folded_lines(items: Sequence[Item], text: dict[Hashable, str]) -> list[str]:
    """The list as indented lines, folded twice: repeated items, and repetitions of such parts.

    Args:
        text: for each key a line with ``{}`` for the number.
    """
    groups = [_group(repeat, text) for repeat in fold(items)]
    lines: list[str] = []
    for outer in fold([Item(group) for group in groups]):
        inside = [line for item in outer.items for line in cast("tuple[str, ...]", item.key)]
        if outer.times > 1:
            lines.append(f"{outer.times} times:")
            inside = [f"  {line}" for line in inside]
        lines += inside
    return lines


def _group(repeat: Repeat, text: dict[Hashable, str]) -> tuple[str, ...]:
    lines = [text[item.key].format(ranges(repeat.numbers(item))) for item in repeat.items]
    if repeat.times == 1 or (len(lines) == 1 and repeat.step):
        return tuple(lines)
    return (f"{repeat.times} times:", *(f"  {line}" for line in lines))
