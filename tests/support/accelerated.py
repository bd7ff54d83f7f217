"""accelerate's FSDP2 plugin on processors: it is made for accelerators alone."""

from __future__ import annotations

from typing import Any

PLUGIN = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_CPU": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip
"""The environment that ``accelerate launch`` makes of a configuration."""


def on_processors() -> None:
    """Let accelerate take its FSDP plugin where there is no accelerator."""
    from accelerate import state
    from accelerate.utils import DistributedType

    init = state.AcceleratorState.__init__

    def made(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if "fsdp_plugin" in vars(self):
            self.distributed_type = DistributedType.FSDP

    state.AcceleratorState.__init__ = made
