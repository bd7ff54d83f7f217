"""FSDP2's names, with the library's communicator: a program changes one import.

``from internsp.fsdp import fully_shard`` (docs/howto/come_from.md).
"""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    share_comm_ctx,
)

from internsp.fsdp.installed import install, options, uninstall
from internsp.fsdp.module import FSDPModule, fully_shard, register_fsdp_forward_method
from internsp.fsdp.optimizer import zero_optimizer
from internsp.fsdp.report import report

__all__ = [
    "CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle",
    "fully_shard", "install", "options", "register_fsdp_forward_method", "report",
    "share_comm_ctx", "uninstall", "zero_optimizer",
]  # fmt: skip
