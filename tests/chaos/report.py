"""A campaign as a table, and as ``docs/dev/reliability.md``."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import Any

import torch

from tests.chaos.runs import NAMED, STEPS, TIMEOUT
from tests.chaos.tally import Found

_WORDS = {
    "kill": "killed (SIGKILL)", "stop": "stopped (SIGSTOP)", "raise": "an exception, or EIO",
    "leave": "ended with status 0 (`os._exit`)", "full": "no space left (ENOSPC)",
    "delay": "late, by up to a second", "corrupt": "a bit flipped, cut short, replaced",
    "power": "power lost: what was not flushed is gone, or zeros", "cut": "link down for good",
}  # fmt: skip


def lines(total: Found) -> Iterator[str]:
    """The counts, as rows of tables."""
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

<!-- Written by the command below; change tests/chaos/report.py instead. -->

```
python -m tests.chaos --faults {options.faults} --seed {options.seed} --workers {options.workers} \\
    --document docs/dev/reliability.md
```

injects faults at randomly drawn points of training runs and of saves, lets the runs resume, and
compares their results with those of runs without faults. The command wrote this page after
{seconds / 60:.0f} minutes on {os.cpu_count()} cores ({platform.system()}, Python
{platform.python_version()}, torch {torch.__version__}).

{table}

The two "longest" times include ranks that were stopped or whose link was cut. Those are noticed
after `parallel.timeout_seconds` ({TIMEOUT} s in these runs). A rank that dies must be named within
{NAMED:.0f} s.

## What happens in it

- **Runs**: one or two ranks of `internsp train`'s own launcher over gloo, {STEPS} steps of a model
  of a few thousand parameters in fp64, a checkpoint every other step, the last two kept. Every
  start except a run's last meets one fault that ends it, and often an earlier fault that does not.
  The run then resumes in the same folder with `checkpoint.resume = "auto"`. The points at which
  faults can happen are counted in each rank: launches of all-gathers (AG), reduce-scatters (RS),
  sums between replicas (EX), all-gathers of the optimizer's updated parameters (PUBLISH),
  torch.distributed's own collectives; optimizer steps; operations on files by a rank and by the
  thread that writes its checkpoints. After every start all checkpoints are read and their
  digests compared. At the end weights, optimizer and random states, losses, and the rows that
  each step took are compared. Some runs change the number of ranks between two starts: their
  weights are compared within 1e-6, those of all others byte for byte.
- **Saves**: the functions that write checkpoints in a run, called for two ranks in one process,
  with a state that advances by a rule in place of a model. After a kill, all operations up to
  that point are on the disk. After a power loss, only flushed content of files is on the disk,
  and of folders the flushed changes and some later ones, in their order: what POSIX promises and
  no more.
- **A link cut**: {cut}.

`tests/support/chaos.py` injects the faults. `tests/ranks/test_chaos.py` runs thirty of them
in every test run and a hundred in `make thorough`, and shows that the campaign detects mistakes
that are put into the library on purpose (`--mistakes`).
"""
