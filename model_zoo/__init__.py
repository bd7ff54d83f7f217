"""Models to train, one file for each family, each readable as single-device code.

Installed as ``internsp.model_zoo``. In a checkout the folder is next to ``internsp``, which links
to it. There ``model_zoo`` is a second name of the same modules, not of copies.
"""

from __future__ import annotations

import importlib
import sys

import torch

from internsp.config.model import ModelConfig
from internsp.model_zoo.common import CausalLM, canonical_name
from internsp.model_zoo.generate import generate, stream
from internsp.model_zoo.internlm2 import InternLM2
from internsp.model_zoo.llama import Llama

__all__ = [
    "FAMILIES",
    "CausalLM",
    "InternLM2",
    "Llama",
    "build",
    "canonical_name",
    "generate",
    "materialize",
    "stream",
]

FAMILIES: dict[str, type[Llama] | type[InternLM2]] = {"llama": Llama, "internlm2": InternLM2}


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
    for name, parameter in model.named_parameters():
        model.initialize(name, parameter, generator)
    return model


if __name__ == "model_zoo":  # imported by the second name, see the docstring
    for _part in ("", ".common", ".generate", ".internlm2", ".llama", ".llama_form"):
        sys.modules[__name__ + _part] = importlib.import_module("internsp.model_zoo" + _part)
