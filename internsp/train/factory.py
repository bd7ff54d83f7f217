"""The factory table: from a configuration to a model. The only place that names the model zoo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import model_zoo
from internsp.config import Config
from internsp.wp.plan import DTYPES


def build_model(config: Config, device: str = "meta") -> torch.nn.Module:
    """The configured model, by default on the meta device (no memory, no values).

    Returns:
        A module called as ``model(input_ids, layout=..., labels=..., loss_chunk=...)``, with an
        ``initialise(name, tensor, generator)`` method.
    """
    return model_zoo.build(config.model, device=device, dtype=DTYPES[config.train.dtype])


def generate(model: torch.nn.Module, prompt: Tensor, tokens: int, **options: Any) -> Tensor:
    """Continue ``prompt`` ``[n]`` by ``tokens`` tokens on one process."""
    return model_zoo.generate(model, prompt, tokens, **options)
