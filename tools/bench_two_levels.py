"""Reductions at once or in two levels, where links between machines are the slower ones.

    sudo python -m tools.bench_two_levels

Four ranks in network namespaces: two machines of two. A rank sends to its neighbor at
``--near-mbit``, to others at ``--far-mbit``. The same model trains with reductions at once and in
two levels (``weight_parallel.reduce``), in turn within each round. Each cell is the
median of the rounds; the losses agree.
"""

from __future__ import annotations

import argparse
import statistics

from tools.bench.levels import TOKENS, WAYS
from tools.bench.ranks import Session, Setup
from tools.bench.ways import timed
from tools.overlap.network import Namespaces, missing

RANKS, MACHINE = 4, 2


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_two_levels", description=__doc__)
    parser.add_argument("--near-mbit", type=float, default=400.0)
    parser.add_argument("--far-mbit", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if why := missing():
        parser.error(why)
    with Namespaces(RANKS) as link:
        link.limit_machines(MACHINE, given.near_mbit, given.far_mbit)
        setup = Setup(
            "tools.bench.levels:Worker", (), RANKS, 120.0, link.interface, link.namespaces
        )
        with Session(setup) as session:
            seconds = timed(session, WAYS, given.rounds, TOKENS)
            print(f"{given.near_mbit:g} Mbit/s within a machine, {given.far_mbit:g} between")
            print("| reductions | seconds | least .. most | MB near | MB far |")
            print("|---|---:|---:|---:|---:|")
            for way, found in seconds.items():
                near, far = session.ask("sent", way=way)[0]
                print(
                    f"| {way} | {statistics.median(found):.3f} | {min(found):.3f} .. "
                    f"{max(found):.3f} | {near / 1e6:.2f} | {far / 1e6:.2f} |"
                )


if __name__ == "__main__":
    main()
