"""What torch's flight recorder knows of collectives that have not ended (NCCL; gloo from 2.13 on).

A hang of which no rank has said the cause is left to torch: its watchdog ends an NCCL group at the
timeout. The recorder runs where ``TORCH_FR_BUFFER_SIZE`` is above 0.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch

_MOST = 4  # collectives named; the first one that is stuck tells the most


def unfinished() -> str:
    """Text: the collectives of this rank that have not ended, oldest first.

    Empty if there are none, or nothing is recorded.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    return "" if dump is None else describe(pickle.loads(dump()))  # noqa: S301 - of this process


def describe(recorded: Mapping[str, Any]) -> str:
    """:func:`unfinished` of the recorder's ``recorded`` (its version 2)."""
    left = [entry for entry in recorded.get("entries", ()) if not _ended(entry)]
    texts = [_text(entry) for entry in left[:_MOST]]
    if len(left) > _MOST:
        texts.append(f"{len(left) - _MOST} later ones")
    return "; ".join(texts)


def _ended(entry: Mapping[str, Any]) -> bool:
    # Gloo never says that a collective has started or completed, only that it is over.
    return entry["state"] == "completed" or bool(entry.get("retired"))


def _text(entry: Mapping[str, Any]) -> str:
    number = entry["p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"]
    name, description = entry["process_group"]
    sizes = ", ".join(str(list(size)) for size in entry["input_sizes"])
    group = f"group {name} ({description})" if description != "undefined" else f"group {name}"
    return f"{entry['profiling_name']} number {number} of {sizes} in {group}: {entry['state']}"
