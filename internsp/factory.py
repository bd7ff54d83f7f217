"""The factory table: from a configuration to a model. The only place that names the model zoo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from internsp import accelerator, model_zoo
from internsp.clients.causal_lm import HFCausalLM, one_document_a_row
from internsp.config import Config, hf_folder
from internsp.errors import ConfigError
from internsp.load import load_weights, stored_shapes, stored_values
from internsp.model_zoo import llama_form
from internsp.model_zoo.common import CausalLM
from internsp.model_zoo.llama_form import config_of as llama_config
from internsp.model_zoo.llama_form import parts as llama_parts
from internsp.parallel import initialize
from internsp.plan.dtypes import DTYPES
from internsp.wp.communicator import ISPCommunicator

__all__ = [
    "Model", "build_model", "build_of_length", "build_to_load", "build_to_train", "device_type",
    "first_values", "generate", "llama_config", "llama_parts", "move_buffers",
    "one_document_a_row", "to_parallelize",
]  # fmt: skip

Model = CausalLM | HFCausalLM


def build_model(config: Config) -> nn.Module:
    """What the configuration hands to ``parallelize``, on the meta device: shapes, no memory."""
    if config.model.family == "hf":
        return to_parallelize(_hf(config, "meta"))
    return _zoo(config)


def build_of_length(config: Config, layers: int) -> Model:
    """The model of a run on the meta device, with its first blocks alone: what :mod:`internsp.plan`
    has a look at."""
    if config.model.family != "hf":
        return _zoo(config.model_copy(update={
            "model": config.model.model_copy(update={"layers": layers, "attention": "sdpa"})
        }))  # fmt: skip
    model = _hf(config, "meta")
    for module in model.model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.model.layers:
            del module[layers:]
    model.model.config.num_hidden_layers = layers
    return model


def build_to_train(config: Config) -> Model:
    """The model of a run; ``parallelize`` takes its :func:`to_parallelize`.

    :func:`first_values` completes it then.

    One of the zoo has no values yet, nor has one of transformers whose folder can be streamed. Any
    other of transformers has them, whole, in this process.

    Returns:
        A module called as ``model(input_ids, layout=..., labels=..., loss_chunk=...)``.
    """
    if config.model.family == "hf":
        return _hf(config, "cpu", weights=True)
    model = _zoo(config)
    if _has_weights(config):
        _check_folder(config, model)
    return model


def build_to_load(config: Config) -> Model:
    """The same for ``load_state_dict(..., assign=True)`` of all parameters."""
    return _hf(config, "cpu") if config.model.family == "hf" else _zoo(config)


def to_parallelize(model: Model) -> nn.Module:
    """Of transformers' the model itself, as it knows itself."""
    return model.model if isinstance(model, HFCausalLM) else model


def first_values(
    config: Config,
    model: Model,
    modules: Sequence[nn.Module],
    communicators: Sequence[ISPCommunicator],
    device: torch.device,
) -> None:
    """Give a parallel model what it needs for its first forward. Collective where a folder is read.

    Args:
        modules: the model, or this rank's chunks of it.
        communicators: one for each.

    Raises:
        StructureError: documents are packed, and the model cannot keep them apart.
    """
    if isinstance(model, CausalLM):
        if _has_weights(config):
            _read_folder(config, modules)
            return
        for communicator in communicators:
            initialize(communicator, model.initialize, config.train.seed)
        return
    if model.unread is not None:
        load_weights(model.model, model.unread)
    move_buffers(model, device)
    if config.data.pack:
        model.require_documents_apart(device)


def _has_weights(config: Config) -> bool:
    """Whether there is a folder from which a model of the zoo takes its values."""
    path = config.model.path
    return path is not None and any(Path(path).glob("*.safetensors"))


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def _check_folder(config: Config, model: CausalLM) -> None:
    """Whether the folder has all tensors of a model, and no others.

    Raises:
        ConfigError: it does not; the message has the tensor's name in the folder.
    """
    folder, shapes = Path(str(config.model.path)), _shapes(model)
    zeros = []
    if hf_folder.kind(str(folder)) == "internlm2":
        wanted = {llama_form.internlm2_name(name): shape for name, shape in shapes.items()}
    else:
        parts = list(llama_parts(config.model, shapes))
        wanted = {part.name: part.shape for part in parts}
        zeros = [part.name for part in parts if part.source is None]
    stored = stored_shapes(folder)
    for name, shape in wanted.items():
        if name not in stored:
            raise ConfigError(f"model.path: {folder} has no {name}")
        if stored[name] != list(shape):
            text = f"has the shape {stored[name]}, the model's has {list(shape)}"
            raise ConfigError(f"model.path: {name} in {folder} {text}")
    for name in stored:
        if name not in wanted and not _implied(name):
            text = "which a model of this family and these sizes has not"
            raise ConfigError(f"model.path: {folder} has {name}, {text}")
    for name, value in stored_values(folder, zeros).items():
        if value.any():
            text = "is not zero, and model.bias would give all linear layers a bias"
            raise ConfigError(f"model.path: {name} in {folder} {text}; set model.family = \"hf\"")


def _implied(name: str) -> bool:
    """Of old folders: the wavelengths of the rotary embedding, which config.json says."""
    return name.endswith(".rotary_emb.inv_freq")


def _read_folder(config: Config, modules: Sequence[nn.Module]) -> None:
    """Every rank its own rows; the folder was checked. Collective."""
    shapes = _shapes(_zoo(config))
    if hf_folder.kind(str(config.model.path)) == "internlm2":
        joined, names = {}, {name: llama_form.internlm2_name(name) for name in shapes}
    else:
        joined = llama_form.fused(config.model, shapes)
        parts = llama_parts(config.model, shapes)
        names = {part.source: part.name for part in parts if part.source is not None}
        names |= {name: name for name in joined}
    for module in modules:
        missing, _ = load_weights(
            module, str(config.model.path), strict=False, joined=joined,
            rename=lambda name: names.get(name, ""),  # a tied head's second name
        )  # fmt: skip
        assert not missing, f"the folder was checked, and has no values of {missing}"


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put buffers beside the parameters, which ``parallelize`` has moved."""
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


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
    model: Model,
    prompt: Tensor,
    tokens: int,
    *,
    seed: int,
    stop_id: int,
    told: Callable[[int], None] | None = None,
    **options: Any,
) -> Tensor:
    """Continue ``prompt`` ``[n]`` by at most ``tokens`` tokens on one process: both.

    Args:
        told: called with each token as soon as it is there.
        options: ``temperature``, ``top_k`` and ``top_p``.
    """
    if isinstance(model, HFCausalLM):
        return model.generate(prompt, tokens, seed=seed, stop_id=stop_id, told=told, **options)
    generator = torch.Generator().manual_seed(seed)
    ids = [prompt]
    for token in model_zoo.stream(
        model, prompt[None], tokens, generator=generator, stop_id=stop_id, **options
    ):
        ids.append(token[0])
        if told is not None:
            told(int(token))
    return torch.cat(ids)
