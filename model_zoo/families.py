"""The families by name: a model of one is built, and a model without memory is materialized."""

from __future__ import annotations

import torch

from internsp.config.model import ModelConfig
from internsp.model_zoo.common import CausalLM
from internsp.model_zoo.deepseek import DeepSeek
from internsp.model_zoo.internlm2 import InternLM2
from internsp.model_zoo.llama import Llama
from internsp.model_zoo.mixtral import Mixtral

FAMILIES: dict[str, type[CausalLM]] = {
    "llama": Llama, "internlm2": InternLM2, "mixtral": Mixtral, "deepseek": DeepSeek,
}  # fmt: skip


def build(
    config: ModelConfig,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> CausalLM:
    """Build a model of ``config.family``.

    Args:
        device: ``"meta"`` builds without memory or values; ``internsp.parallelize`` shards and
            materializes the model, or :func:`materialize` does. None is torch's default device.
        dtype: of the parameters; None is torch's default dtype.
        generator: its seed determines the values (see :meth:`CausalLM.initialize`); None takes the
            seed of ``torch.manual_seed``, so that two models built under one seed are equal.

    Raises:
        LayoutError: sizes that do not fit.
        MissingDependencyError: a norm or kernel that is not installed.
    """
    model = FAMILIES[config.family](config, device="meta", dtype=dtype)
    target = torch.get_default_device() if device is None else torch.device(device)
    return model if target.type == "meta" else materialize(model, target, generator)


def materialize(
    model: CausalLM, device: torch.device | str, generator: torch.Generator | None = None
) -> CausalLM:
    """Allocate an unsharded model on ``device`` and initialize it, in place; return it."""
    if generator is None:
        generator = torch.Generator().manual_seed(torch.initial_seed())
    model.to_empty(device=torch.device(device))
    model.tie()
    for buffer in model.buffers():  # to_empty gave them no values; those of routers begin at 0
        buffer.zero_()
    for name, parameter in model.named_parameters():
        model.initialize(name, parameter, generator)
    return model
