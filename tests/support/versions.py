"""Which torch the tests run under: what torch does itself differs between the versions."""

from __future__ import annotations

import torch


def since(version: str) -> bool:
    """Whether this torch is ``version`` or a later one."""
    return bool(torch.torch_version.TorchVersion(torch.__version__) >= version)
