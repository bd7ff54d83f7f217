"""A campaign as a table, and as ``docs/reliability.md``."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import Any

import torch

from tools.chaos.runs import NAMED, STEPS, TIMEOUT
from tools.chaos.tally import Found

_WORDS = {
    "kill": "killed (SIGKILL)", "stop": "stopped (SIGSTOP)", "raise": "an exception, or EIO",
    "leave": "ended with status 0 (`os._exit`)", "full": "no space left (ENOSPC)",
    "delay": "late, by up to a second", "corrupt": "a bit flipped, cut short, replaced",
    "power": "power lost: what was not flushed is gone, or zeros", "cut": "link down for good",
}  # fmt: skip


def lines(total: Found) -> Iterator[str]:
    """What was counted, as rows of tables."""
    yield "| fault | where | number |"
    yield "|---|---|---:|"
    for fault, number in total.by_kind().items():
        yield f"| {_WORDS.get(fault.kind, fault.kind)} | {fault.where} | {number} |"
    yield f"| **all** | | **{len(total.faults)}** |"
    yield ""
    yield "| found | |"
    yield "|---|---:|"
    for what, value in _counts(total):
        yield f"| {what} | {value} |"


def _counts(total: Found) -> Iterator[tuple[str, Any]]:
    yield "training runs that faults happened to", total.runs
    yield "restarts, of runs and of saves", total.restarts
    yield "hangs", total.hangs
    yield "unusable folders of checkpoints, or valid checkpoints lost", total.unusable
    yield "tokens lost", total.lost
    yield "tokens repeated", total.repeated
    yield "runs whose last weights are not those of the undisturbed run", total.different
    yield "processes, temporary files and shared memory left over", total.left
    yield "failures whose message does not name the rank", total.unnamed
    yield "longest time from the death of a rank to its name, s", f"{total.named:.1f}"
    yield "longest time from a fault to the end of all ranks, s", f"{total.worst:.1f}"


def document(total: Found, options: Any, seconds: float, network: bool) -> str:
    """The page."""
    cut = (
        "in a network namespace of its own"
        if network
        else "not tried: this machine gives no process a network of its own (`unshare --net`)"
    )
    table = "\n".join(lines(total))
    return f"""# Reliability

<!-- Written by the command below; change tools/chaos/report.py instead. -->

```
python -m tools.chaos --faults {options.faults} --seed {options.seed} --workers {options.workers} \\
    --document docs/reliability.md
```

lets faults happen at drawn places of training runs and of saves, has the runs go on, and compares
what they leave with runs that nothing happened to. This page is what it wrote after
{seconds / 60:.0f} minutes on {os.cpu_count()} cores ({platform.system()}, Python
{platform.python_version()}, torch {torch.__version__}).

{table}

"Longest" includes ranks that were stopped or whose link was cut, which are noticed after
`parallel.timeout_seconds` ({TIMEOUT} s in these runs); a rank that dies is to be named within
{NAMED:.0f} s.

## What happens in it

- **Runs**: one or two ranks of `internsp train`'s own launcher over gloo, {STEPS} steps of a
  model of a few thousand parameters in fp64, a checkpoint every other step, two kept. Each start
  but a run's last meets one fault that ends it, and often one before that does not; it goes on in
  the same folder by `checkpoint.resume = "auto"`. Points are counted in each rank: launches of
  all-gathers (AG), reduce-scatters (RS), sums between replicas (EX), new values from the
  optimizer (PUBLISH), torch.distributed's own collectives; optimizer steps; operations on files
  by a rank and by the process that writes its checkpoints. After every start all checkpoints are
  read and their digests compared; at the end weights, optimizer and random states, losses, and
  the rows that each step took. Some runs change the number of ranks between two starts: their
  weights are compared within 1e-6, all others byte for byte.
- **Saves**: the same functions that write checkpoints in a run, for two ranks in one process,
  with a state that advances by a rule in place of a model. Killed: all operations up to one are
  there. Power lost: of files only what was flushed is sure, of folders what was flushed and some
  later changes, in their order, as POSIX promises and no more.
- **A link cut**: {cut}.

`tests/support/chaos.py` puts faults in, `tests/ranks/test_chaos.py` runs at least a hundred of
them at every check, and shows that the campaign sees mistakes that are put into the library on
purpose (`--mistakes`).
"""
