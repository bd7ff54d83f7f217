"""Make a model from a configuration. The only module that imports the model zoo."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from internsp import model_zoo
from internsp.app.config import Config
from internsp.app.models.causal_lm import HFCausalLM
from internsp.base import accelerator
from internsp.config import hf_folder
from internsp.config.model import ModelConfig
from internsp.errors import ConfigError
from internsp.model_zoo import llama_form, mixture_form
from internsp.model_zoo.common import CausalLM, canonical_name
from internsp.model_zoo.llama_form import ExportedTensor
from internsp.parallel.parallelize import initialize
from internsp.structure.dtypes import DTYPES
from internsp.values.load import load_weights, stored_shapes, stored_values
from internsp.wp.communicator import ISPCommunicator

Model = CausalLM | HFCausalLM


def build(config: Config, device: str = "meta", weights: bool = False) -> Model:
    """The model of a run; one of the zoo is on the meta device.

    Args:
        device, weights: of a model of transformers, see :class:`HFCausalLM`.
    """
    dtype = DTYPES[config.train.dtype]
    if config.model.family != "hf":
        return model_zoo.build(config.model, device="meta", dtype=dtype)
    assert config.model.path is not None, "model.path is checked with model.family"
    return HFCausalLM(config.model.path, dtype, config.train.seed, device, weights)


def build_model(config: Config) -> nn.Module:
    """The module that a run passes to ``parallelize``, on the meta device."""
    return to_parallelize(build(config))


def build_first_layers(config: Config, layers: int, kinds: Sequence[int] = ()) -> Model:
    """The model of a run with only its first ``layers`` blocks, on the meta device.

    :mod:`internsp.app.plan.observe` observes its forward and backward.

    Args:
        kinds: numbers of a zoo's blocks that it has instead, copied where they repeat.
    """
    if config.model.family != "hf":
        number = max(kinds) + 1 if kinds else layers
        config = config.replaced({"model.layers": number, "model.attention": "sdpa"})
    made = build(config)
    if isinstance(made, HFCausalLM):
        for module in made.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == config.model.layers:
                del module[layers:]
        made.model.config.num_hidden_layers = layers
    elif kinds:
        blocks = list(made.layers)
        first = {kind: kinds.index(kind) for kind in kinds}
        made.layers = nn.ModuleList(
            blocks[kind] if at == first[kind] else deepcopy(blocks[kind])
            for at, kind in enumerate(kinds)
        )
    return made


def build_for_training(config: Config) -> Model:
    """The model of a run. Pass its :func:`to_parallelize` to ``parallelize``, then call
    :func:`fill_parameters`.

    A model of the zoo, or one of transformers whose folder can be streamed, is on the meta device
    and has no values yet. Any other model of transformers has unsharded values in this process.

    Returns:
        A module that is called as ``model(input_ids, layout=..., labels=..., loss_chunk=...)``.
    """
    model = build(config, "cpu", weights=True)
    check_stored(config, model)
    return model


def check_stored(config: Config, model: nn.Module) -> None:
    """Require that the folder of a model of the zoo, if it holds weights, has all of its tensors
    and no others. Reads the heads of files alone.

    Raises:
        ConfigError: a tensor is missing, superfluous or has another shape; the message has its
            name in the folder.
    """
    if not isinstance(model, CausalLM) or not _has_stored_weights(config):
        return
    folder, parts = Path(str(config.model.path)), _stored_parts(config, model)
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
        # Rotary frequencies, which old folders contain, follow from config.json.
        if name not in wanted and not name.endswith(".rotary_emb.inv_freq"):
            text = "which a model of this family and these sizes does not have"
            raise ConfigError(f"model.path: {folder} has {name}, {text}")
    for name, value in stored_values(folder, zeros).items():
        if value.any():
            text = "and model.bias would give all linear layers a bias"
            if "correction" in name:
                text = "and model.balance_rate = 0 gives the choice of experts no bias"
            text = f"is not zero, {text}"
            raise ConfigError(f'model.path: {name} in {folder} {text}; set model.family = "hf"')


def to_parallelize(model: Model) -> nn.Module:
    """The module for ``parallelize``: for a wrapped model of transformers the model itself."""
    return model.model if isinstance(model, HFCausalLM) else model


def fill_parameters(
    config: Config,
    model: Model,
    modules: Sequence[nn.Module],
    communicators: Sequence[ISPCommunicator],
    device: torch.device,
) -> None:
    """Load or initialize a parallel model's parameters and buffers, for its first forward.

    Collective if a folder is read.

    Args:
        modules: the model, or this rank's chunks of it.
        communicators: the communicator of each module.

    Raises:
        StructureError: documents are packed, but the model's attention cannot separate them.
    """
    if isinstance(model, CausalLM):
        move_buffers(model, device)
        if _has_stored_weights(config):
            _load_folder(config, modules)
            return
        for communicator in communicators:
            initialize(communicator, model.initialize, config.train.seed)
        return
    if model.unread is not None:
        load_weights(model.model, model.unread)
    move_buffers(model, device)
    if config.data.pack:
        model.check_documents_separate(device)


def _has_stored_weights(config: Config) -> bool:
    """Whether ``model.path`` is a folder with weights for a model of the zoo."""
    path = config.model.path
    return path is not None and any(Path(path).glob("*.safetensors"))


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of all values that a folder has: parameters, once each, and biases of routers."""
    kept = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    values = [*model.named_parameters(), *((name, model.get_buffer(name)) for name in kept)]
    return {name: tuple(value.shape) for name, value in values}


def _stored_parts(config: Config, model: CausalLM) -> list[ExportedTensor]:
    """Every tensor that the folder of a model of the zoo should have."""
    kind = hf_folder.kind(str(config.model.path))
    return list(form_of(config.model).exported_tensors(config.model, _shapes(model), kind))


def _load_folder(config: Config, modules: Sequence[nn.Module]) -> None:
    """Load this rank's rows, and all of the routers' biases, from a folder that was checked.

    Collective.
    """
    folder, model = Path(str(config.model.path)), build(config)
    assert isinstance(model, CausalLM), "a run whose own model is of the zoo"
    names = {p.source: p.name for p in _stored_parts(config, model) if p.source is not None}
    weights = dict(model.named_parameters())
    joined = form_of(config.model).joined_tensors(
        config.model, _shapes(model), hf_folder.kind(str(folder))
    )
    found = {name: name if name in joined else names[name] for name in weights}
    for module in modules:
        missing, _ = load_weights(
            module, folder, strict=False, joined=joined,
            rename=lambda name: found.get(name, ""),  # a tied head's second name
        )  # fmt: skip
        lost = [name for name in missing if name in weights]
        assert not lost, f"the folder was checked, and has no values of {lost}"
        for name, buffer in module.named_buffers():
            if stored := names.get(canonical_name(name)):  # a Mixtral has none: it begins at 0
                buffer.copy_(stored_values(folder, [stored])[stored].view_as(buffer))


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to ``device``, to which ``parallelize`` has moved the parameters."""
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def form_of(model: ModelConfig) -> Any:
    """The module that says how a model of the zoo is written for transformers."""
    return mixture_form if model.mixtures else llama_form


def device_type(config: Config) -> str:
    """The device type on which a run of this configuration would compute on this host."""
    chosen = config.parallel.device
    return accelerator.default_device_type() if chosen == "auto" else chosen


def generate(
    model: Model,
    prompt: Tensor,
    tokens: int,
    *,
    seed: int,
    stop_id: int,
    **options: Any,
) -> Tensor:
    """Continue ``prompt`` ``[n]`` by at most ``tokens`` tokens, on one process.

    Returns the prompt and its continuation.

    Args:
        options: sampling options ``temperature``, ``top_k`` and ``top_p``.
    """
    if isinstance(model, HFCausalLM):
        return model.generate(prompt, tokens, seed=seed, stop_id=stop_id, **options)
    generator = torch.Generator().manual_seed(seed)
    options |= {"generator": generator, "stop_id": stop_id}
    return model_zoo.generate(model, prompt, tokens, **options)
