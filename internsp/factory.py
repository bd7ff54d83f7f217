"""The factory table: from a configuration to a model. The only place that names the model zoo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from internsp import accelerator, model_zoo
from internsp.clients.causal_lm import HFCausalLM
from internsp.config import Config
from internsp.load import load_weights
from internsp.model_zoo.common import CausalLM
from internsp.model_zoo.llama_form import config_of as llama_config
from internsp.model_zoo.llama_form import parts as llama_parts
from internsp.parallel import initialize
from internsp.plan.dtypes import DTYPES
from internsp.wp.communicator import ISPCommunicator

__all__ = [
    "Model", "build_model", "build_to_load", "build_to_train", "device_type", "first_values",
    "generate", "llama_config", "llama_parts", "to_parallelize",
]  # fmt: skip

Model = CausalLM | HFCausalLM


def build_model(config: Config) -> nn.Module:
    """What the configuration hands to ``parallelize``, on the meta device: shapes, no memory."""
    if config.model.family == "hf":
        return to_parallelize(_hf(config, "meta"))
    return _zoo(config)


def build_to_train(config: Config) -> Model:
    """The model of a run; ``parallelize`` takes its :func:`to_parallelize`.

    :func:`first_values` completes it then.

    One of the zoo has no values yet, nor has one of transformers whose folder can be streamed. Any
    other of transformers has them, whole, in this process.

    Returns:
        A module called as ``model(input_ids, layout=..., labels=..., loss_chunk=...)``.
    """
    return _hf(config, "cpu", weights=True) if config.model.family == "hf" else _zoo(config)


def build_to_load(config: Config) -> Model:
    """The same for ``load_state_dict(..., assign=True)`` of all parameters."""
    return _hf(config, "cpu") if config.model.family == "hf" else _zoo(config)


def to_parallelize(model: Model) -> nn.Module:
    """Of transformers' the model itself, as it knows itself."""
    return model.model if isinstance(model, HFCausalLM) else model


def first_values(
    config: Config, model: Model, communicators: Sequence[ISPCommunicator], device: torch.device
) -> None:
    """Give a parallel model what it needs for its first forward. Collective for transformers'.

    Raises:
        StructureError: documents are packed, and the model cannot keep them apart.
    """
    if isinstance(model, CausalLM):
        for communicator in communicators:
            initialize(communicator, model.initialize, config.train.seed)
        return
    if model.unread is not None:
        load_weights(model.model, model.unread)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    if config.data.pack:
        model.require_documents_apart(device)


def _zoo(config: Config) -> CausalLM:
    return model_zoo.build(config.model, device="meta", dtype=DTYPES[config.train.dtype])


def _hf(config: Config, device: str, weights: bool = False) -> HFCausalLM:
    assert config.model.path is not None, "a combination that is checked"
    dtype = DTYPES[config.train.dtype]
    return HFCausalLM(config.model.path, dtype, config.train.seed, device, weights)


def device_type(config: Config) -> str:
    """What a run of this configuration would compute on, here."""
    chosen = config.parallel.device
    if chosen == "auto":
        return accelerator.kind()
    return chosen


def generate(
    model: Model, prompt: Tensor, tokens: int, *, seed: int, stop_id: int, **options: Any
) -> Tensor:
    """Continue ``prompt`` ``[n]`` by ``tokens`` tokens on one process.

    Args:
        options: ``temperature`` and ``top_k``.
    """
    if isinstance(model, HFCausalLM):
        return model.generate(prompt, tokens, seed=seed, stop_id=stop_id, **options)
    generator = torch.Generator().manual_seed(seed)
    return model_zoo.generate(
        model, prompt, tokens, generator=generator, stop_id=stop_id, **options
    )
