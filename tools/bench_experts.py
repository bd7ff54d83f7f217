"""Weights to tokens or tokens to weights, on a slow link: which is faster, and which was picked.

    sudo python -m tools.bench_experts
    python -m tools.bench_experts --products

Two ranks in network namespaces joined by a link of ``--rate-mbit``. The same mixture is trained in
four ways, in turn within each round: ours with experts gathered and with tokens exchanged, FSDP2,
and FSDP2 for all but the experts, whose tokens are exchanged as torch alone does it: one row for
each pair of a token and an expert. Tokens of a rank are a quarter of T*, T* and four times T*
(internsp/experts/rule.py). Each cell is the median of the rounds; the losses of all ways agree.

``--products``: one process computes forward and backward of the experts alone, ours beside each
implementation of transformers, in turn within each round, in processor time of one thread; their
results agree.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from internsp.experts.rule import ExpertTraffic
from internsp.layers.experts import Experts
from tools.bench.mixture import EXPERTS, HIDDEN, LAYERS, TOP_K, WAYS, WIDTH
from tools.bench.ranks import Session, Setup
from tools.overlap.network import Link, Namespaces, missing


def table(session: Session, rounds: int) -> list[str]:
    """Lines: tokens, seconds of each way, and the rule's pick."""
    weights = 3 * EXPERTS * HIDDEN * WIDTH * 4
    traffic = ExpertTraffic(EXPERTS, TOP_K, WIDTH, 3 * weights // 2, 2, 1, 4, 4)
    lines = [f"| tokens | {' | '.join(WAYS)} | picked |", "|---:|" + "---:|" * len(WAYS) + "---|"]
    for share in (0.25, 1.0, 4.0):
        tokens = int(share * traffic.threshold)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        losses = {}
        for number in range(rounds + 1):  # the first round warms up
            for way in WAYS:
                replies = session.ask("step", way=way, tokens=tokens)
                losses[way] = sum(loss for _, loss in replies)
                if number:
                    seconds[way].append(max(s for s, _ in replies))
        spread = max(losses.values()) - min(losses.values())
        assert spread < 1e-3 * abs(losses["gathered"]), f"the ways compute other losses: {losses}"
        exchanges = replace(traffic, tokens=tokens).exchanges
        pick = "exchanged" if exchanges else "gathered"
        cells = " | ".join(f"{statistics.median(seconds[way]):.2f} s" for way in WAYS)
        lines.append(f"| {tokens:,} ({share:g} T*) | {cells} | {pick} |")
    return lines


def products(rounds: int) -> list[str]:
    """Lines: dtype and tokens, and milliseconds of our experts and of each implementation."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.set_num_threads(1)
    names = ("eager", "batched_mm", "grouped_mm")
    lines = [f"| dtype, tokens | ours | {' | '.join(names)} |", "|---|" + "---:|" * 4]
    for dtype, tokens in itertools.product((torch.float32, torch.bfloat16), (256, 2048)):
        ours = Experts(EXPERTS, WIDTH, HIDDEN, dtype=dtype)
        ways: dict[str, Callable[..., torch.Tensor]] = {"ours": lambda *a, o=ours: o(*a)[0]}
        for name in names:
            config = MixtralConfig(
                hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS,
                experts_implementation=name,
            )  # fmt: skip
            theirs: Any = MixtralExperts(config).to(dtype)
            with torch.no_grad():
                theirs.gate_up_proj.copy_(ours.gate_up.mT)
                theirs.down_proj.copy_(ours.down.mT)
            ways[name] = theirs
        x = torch.randn(tokens, WIDTH, dtype=dtype, requires_grad=True)
        weights, index = torch.randn(tokens, EXPERTS).softmax(-1).topk(TOP_K)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):  # the first round warms up
            wanted = None
            for name, way in ways.items():
                start = time.process_time()
                made = way(x, index, weights.to(dtype))
                made.square().sum().backward()
                if number:
                    seconds[name].append(time.process_time() - start)
                wanted = made.detach() if wanted is None else wanted
                torch.testing.assert_close(made.detach(), wanted, rtol=0.05, atol=0.05)
        cells = " | ".join(f"{1e3 * statistics.median(s):.1f} ms" for s in seconds.values())
        lines.append(f"| {str(dtype).removeprefix('torch.')}, {tokens:,} | {cells} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_experts", description=__doc__)
    parser.add_argument("--rate-mbit", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--products", action="store_true", help="one process, the experts alone")
    parser.add_argument("--loopback", action="store_true", help="no rate limit, any user")
    given = parser.parse_args()
    if given.products:
        print("\n".join(products(given.rounds)))
        return
    if not given.loopback and (why := missing()):
        parser.error(f"{why}; --loopback needs neither, and measures no slow link")
    with ExitStack() as stack:
        link: Link = stack.enter_context(Link() if given.loopback else Namespaces(2))
        setup = Setup("tools.bench.mixture:Worker", (), 2, 300.0, link.interface, link.namespaces)
        session = stack.enter_context(Session(setup))
        link.limit(given.rate_mbit)
        rate = "" if given.loopback else f", {given.rate_mbit:g} Mbit/s"
        print(f"{link.label}{rate}; {LAYERS} blocks of {EXPERTS} experts, {WIDTH} x {HIDDEN}")
        print("\n".join(table(session, given.rounds)))


if __name__ == "__main__":
    main()
