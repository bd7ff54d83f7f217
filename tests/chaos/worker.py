"""A process of a campaign: reads tasks as lines of JSON, and writes the result of each."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from tests.chaos.tasks import Tasks
from tests.support import chaos


def main() -> None:
    """``argv``: seed, whether it has its own network, then mistakes."""
    seed, network, *mistakes = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard what ranks print
    os.dup2(1, 2)
    if network == "1":
        chaos.link(True)
    tasks = Tasks(int(seed), mistakes, private=True, network=network == "1")
    for line in sys.stdin:
        number, kind = json.loads(line)
        found = tasks.do(number, kind)
        print(json.dumps([kind, dataclasses.asdict(found)]), file=answers, flush=True)
    tasks.close()


if __name__ == "__main__":
    main()
