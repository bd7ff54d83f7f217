"""All ranks' routes of a ring, and what they send, counted step by step."""

from __future__ import annotations

from internsp.sp.ranges import MaskSpec, Ranges
from internsp.sp.routes import Route, Transfer, route


def routes(
    held: tuple[Ranges, ...], spec: MaskSpec, form: str = "auto", inner: int = 1
) -> list[Route]:
    """The route of each rank."""
    return [route(held, spec, rank, form, inner) for rank in range(len(held))]


def positions_of(move: Transfer | None) -> int:
    """Positions that are sent; none without a transfer."""
    return 0 if move is None else sum(stop - start for start, stop in move.spans)


def sent(of: Route) -> int:
    """Positions whose keys and values a rank sends in a forward, and again in a backward."""
    return sum(positions_of(move) for step in of.steps for move in step.sends)


def returned(of: Route) -> int:
    """Positions whose gradients of keys and values it sends in a backward."""
    return sum(positions_of(step.gradient_send) for step in of.steps)


def received(of: Route) -> list[int]:
    """Positions that come in each step."""
    return [sum(map(positions_of, step.receives)) for step in of.steps]
