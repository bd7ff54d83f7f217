"""The factory table: from a configuration to a model. The only place that names the model zoo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import model_zoo
from internsp.config import Config
from internsp.plan.dtypes import DTYPES
from model_zoo.common import CausalLM as Model

__all__ = ["Model", "build_model", "device_type", "generate"]


def build_model(config: Config, device: str = "meta") -> Model:
    """The configured model, by default on the meta device (no memory, no values).

    Returns:
        A module called as ``model(input_ids, layout=..., labels=..., loss_chunk=...)``, with an
        ``initialize(name, tensor, generator)`` method.
    """
    return model_zoo.build(config.model, device=device, dtype=DTYPES[config.train.dtype])


def device_type(config: Config) -> str:
    """What a run of this configuration would compute on, here."""
    chosen = config.parallel.device
    if chosen == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return chosen


def generate(model: Model, prompt: Tensor, tokens: int, **options: Any) -> Tensor:
    """Continue ``prompt`` ``[n]`` by ``tokens`` tokens on one process."""
    return model_zoo.generate(model, prompt, tokens, **options)
