"""Checks of values that are valid alone but not together. Each check names the keys involved."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from internsp.app.config.errors import Problem
from internsp.app.config.sections import OPTIMIZERS, DocumentsConfig
from internsp.config import hf_folder
from internsp.config.combinations import mistakes, mistakes_of_blocks
from internsp.config.degrees import impossible
from internsp.config.words import in_words

if TYPE_CHECKING:
    from internsp.app.config import Config, DataConfig

HELD_OUT = "held-out"
"""Names of evaluations that no table defines."""

ROWS = ("jsonl", "parquet", "datasets")
"""Sources that have rows of named columns."""
_OTHER_WEIGHTS = ("bin", "pt", "pth", "gguf", "h5", "msgpack", "safetensors.index.json")
# Keys of the section model that only the zoo's models read.
_OF_EXPERTS = (
    "experts", "top_k", "expert_size", "auxiliary", "z_loss", "capacity_factor", "balance_rate",
)  # fmt: skip
_OF_DEEPSEEK = ("shared_size", "dense_layers", "latent_size", "rotary_size")
_OF_THE_ZOO = (
    "rope_theta", "norm_eps", "qkv_bias", "bias", "norm", "attention", "init_std", "dropout",
    *_OF_EXPERTS, *_OF_DEEPSEEK,
)  # fmt: skip
# Keys of a degree that the section parallel does not have by itself.
_DEGREES = {
    "ring": ("sequence.ring", "parallel.sequence"),
    "zero": ("parallel.optimizer_ranks", "parallel.weight", "launch.processes"),
    "expert_weight": ("parallel.expert_weight", "parallel.expert", "launch.processes"),
}


def combinations(config: Config) -> Iterator[Problem]:
    """Mistakes that do not depend on the machine or the number of ranks."""
    yield from _model(config)
    yield from _data(config)
    yield from _memory_and_order(config)
    yield from _pipeline(config)
    yield from _optimizer(config)
    yield from _train(config)
    yield from _report(config)
    yield from _unused(config)


def _unused(config: Config) -> Iterator[Problem]:
    """Keys that are set and that other keys leave without an effect (WP-17).

    Not where a feature is said to be off: its details may stay in the file.
    """
    train, optimizer = config.train, config.optimizer
    scales = train.dtype == "float16" or "dtype" in train.model_fields_set
    keep = config.checkpoint
    needs = {
        "optimizer.loss_scale_init": (scales, 'train.dtype = "float16"'),
        "optimizer.min_lr_ratio": (
            optimizer.schedule != "constant", "another optimizer.schedule than constant",
        ),
        "train.profile_steps": (
            train.profile != "timeline", 'train.profile = "torch" or "memory"',
        ),
        "checkpoint.keep_every": (
            keep.keep_last > 0 or "keep_last" in keep.model_fields_set,
            "checkpoint.keep_last; without it all are kept",
        ),
        "sequence.balance": (
            config.parallel.pipeline == 1 or config.degrees()["ring"] == 1
            or config.sequence.balance == "zigzag",
            'parallel.pipeline = 1: stages deal positions by "zigzag"',
        ),
        "parallel.fast_links": (
            config.parallel.expert not in (1, "auto")
            and (config.parallel.expert_weight or config.parallel.weight) > 1,
            "parallel.expert and parallel.expert_weight, both above 1",
        ),
    }  # fmt: skip
    for name, (there, what) in needs.items():
        section, _, key = name.partition(".")
        if not there and getattr(config, section).asks(key):
            yield Problem((name,), f"of no effect here: it needs {what}")


def machine(config: Config, world_size: int) -> Iterator[Problem]:
    """Mistakes for ``world_size`` ranks, or with the files on this machine."""
    yield from degrees(config, world_size)
    yield from _files(config)


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.family == "hf":
        yield from _hf(config)
        return
    heads_keys = ("model.heads", "model.hidden_size", "model.head_dim")
    if model.head_dim is None and model.hidden_size % model.heads:
        text = f"{model.heads} heads do not divide hidden_size = {model.hidden_size}"
        yield Problem(heads_keys, f"{text}; change one, or give model.head_dim")
    elif (size := model.head_size) % 2:
        lead = "model.head_dim" if model.head_dim else "model.heads"
        keys = (lead, *(key for key in heads_keys if key != lead))
        yield Problem(keys, f"{size} features a head, but rotary embedding needs an even number")
    if model.kv_heads is not None and model.heads % model.kv_heads:
        text = f"{model.kv_heads} key/value heads do not divide heads = {model.heads}"
        yield Problem(("model.kv_heads", "model.heads"), text)
    yield from _experts(config)


def _experts(config: Config) -> Iterator[Problem]:
    """Keys of families with experts, and what these families do not do."""
    model = config.model
    has_experts, latent = model.family in ("mixtral", "deepseek"), model.family == "deepseek"
    of = dict.fromkeys(_OF_EXPERTS, ("mixtral or deepseek", has_experts))
    of |= dict.fromkeys(_OF_DEEPSEEK, ("deepseek", latent))
    for key, (families, has) in of.items():
        if not has and model.asks(key):
            text = f"of no effect here: it needs model.family = {families}"
            yield Problem((f"model.{key}", "model.family"), text)
    if not has_experts:
        return
    if model.top_k > model.experts:
        text = f"a token cannot pass {model.top_k} of {model.experts} experts"
        yield Problem(("model.top_k", "model.experts"), text)
    if not model.mixtures:
        text = f"none of {model.layers} blocks has experts: lower it, or take family llama"
        yield Problem(("model.dense_layers", "model.layers"), text)
    if model.family == "mixtral" and model.intermediate_size and model.expert_size:
        text = "of no effect with model.expert_size: every feed forward of mixtral is of experts"
        yield Problem(("model.intermediate_size", "model.expert_size"), text)
    owners = config.parallel.expert
    if owners != "auto" and model.experts % owners:
        text = f"{owners} owners do not divide {model.experts} experts"
        yield Problem(("parallel.expert", "model.experts"), text)
    if config.activation_checkpoint.tiles != 1:
        text = f"experts of {model.family} take all tokens of a block at once: use 1"
        yield Problem(("activation_checkpoint.tiles", "model.family"), text)
    if not latent:
        return
    if model.kv_heads is not None and model.kv_heads != model.heads:
        text = "every head of latent attention has its own key: leave it out"
        yield Problem(("model.kv_heads", "model.family"), text)
    dim = model.head_size
    if model.rotary_size is not None and (model.rotary_size % 2 or model.rotary_size > dim):
        text = f"{model.rotary_size} of {dim} features a head: choose an even number up to {dim}"
        yield Problem(("model.rotary_size", "model.head_dim"), text)


def _hf(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.path is None:
        text = 'model.family = "hf" needs a folder with config.json'
        yield Problem(("model.path", "model.family"), text)
    for key in _OF_THE_ZOO:
        if model.asks(key):
            text = 'only for the model zoo; with family = "hf" config.json has it'
            yield Problem((f"model.{key}", "model.family"), text)
    if config.parallel.pipeline > 1:
        text = f'{config.parallel.pipeline} is not supported with model.family = "hf"; use 1'
        yield Problem(("parallel.pipeline", "model.family"), text)
    if config.sequence.head_output != "local":
        text = 'only "local" with model.family = "hf", whose head computes its logits itself'
        yield Problem(("sequence.head_output", "model.family"), text)


def _folder(config: Config) -> Iterator[Problem]:
    """Check that the folder of a transformers model is readable and agrees with the section."""
    model = config.model
    if model.path is None:
        return
    found, mistake = hf_folder.sizes(model.path, model.family)
    if mistake is not None:
        yield Problem(("model.path",), mistake)
        return
    for key, names in hf_folder.missing(found).items():
        if key not in model.model_fields_set:
            text = f"{hf_folder.FILE} has no {names}: set model.{key}"
            yield Problem(("model.path",), text)
    for key, value in found.items():
        if getattr(model, key) != value:
            text = f"{hf_folder.FILE} of model.path says {in_words(value)}; leave it out"
            given = in_words(getattr(model, key))
            yield Problem((f"model.{key}", "model.path"), f"{given}, but {text}")
    folder = Path(model.path)
    others = sorted(file for kind in _OTHER_WEIGHTS for file in folder.glob(f"*.{kind}"))
    if others and not any(folder.glob("*.safetensors")):
        text = f"{others[0]} is not read, and there is no *.safetensors: convert the weights to it"
        yield Problem(("model.path",), text)


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.mixture:
        for key in DocumentsConfig.model_fields:
            if data.asks(key):
                text = "unused with data.mixture, whose tables have it; leave it out"
                yield Problem((f"data.{key}", "data.mixture"), text)
    else:
        for keys, text in _documents(data, "data.", data.tokenizer):
            yield Problem(tuple(f"data.{key}" for key in keys), text)
    yield from _tables(data)
    if data.evaluation and not config.train.eval_batches:
        text = "set it above 0, or leave the tables out: nothing is evaluated"
        yield Problem(("train.eval_batches", "data.evaluation"), text)
    if data.tokenizer == "bytes" and config.model.vocab_size < 257:
        text = f"bytes need 257 ids (256 and the end of a document), got {config.model.vocab_size}"
        yield Problem(("model.vocab_size", "data.tokenizer"), text)
    if data.sequence_length < config.parallel.sequence:
        ranks = config.parallel.sequence
        text = f"{data.sequence_length} tokens cannot be split over {ranks} ranks"
        yield Problem(("data.sequence_length", "parallel.sequence"), text)


def _tables(data: DataConfig) -> Iterator[Problem]:
    """Mistakes in the texts that are mixed, and in those that are evaluated."""
    for kind, tables, names in (
        ("mixture", data.mixture, [part.called for part in data.mixture]),
        ("evaluation", data.evaluation, [text.name for text in data.evaluation]),
    ):
        for at, (given, name) in enumerate(zip(tables, names, strict=True)):
            found = [*_documents(given, "", data.tokenizer)]
            if name in names[:at]:
                text = f"another is called {name!r}, too: give it a name of its own"
                found.append((("name",), text))
            if kind == "evaluation" and name == HELD_OUT:
                found.append((("name",), f"{name!r} is the name of another figure; choose one"))
            for keys, text in found:
                yield Problem((f"data.{kind}",), f"table {at + 1}: {keys[0]}: {text}")


def _documents(
    given: DocumentsConfig, prefix: str, tokenizer: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    """(keys, mistake) for where documents come from, and names of columns that are not read."""
    if given.source == "stdlib" and given.paths:
        text = f'unused with {prefix}source = "stdlib"; set {prefix}source to "text", "jsonl", '
        yield ("paths", "source"), f'{text}"parquet", "datasets" or "tokens"'
    if given.source != "stdlib" and not given.paths:
        text = f'{prefix}source = "{given.source}" needs at least one file or folder'
        yield ("paths", "source"), text
    if given.format != "text":
        if given.source not in ROWS:
            text = f'"{given.format}" needs rows: set {prefix}source to "jsonl", "parquet" or '
            yield ("format", "tokenizer"), f'{text}"datasets"'
        if tokenizer == "bytes":
            text = f'"{given.format}" needs the chat template of a tokenizer: set data.tokenizer '
            yield ("format", "tokenizer"), f"{text}to a folder that transformers reads"
    for key, format_ in {"text_field": "text", "messages_field": "chat"}.items():
        if given.asks(key) and not (given.source in ROWS and given.format == format_):
            needs = f'{prefix}source = "jsonl", "parquet" or "datasets", and {prefix}format = '
            text = f'of no effect here: it needs {needs}"{format_}"'
            yield (key, "source", "format"), text


def _memory_and_order(config: Config) -> Iterator[Problem]:
    weights, again, model = config.weight_parallel, config.activation_checkpoint, config.model
    ring, stages = config.degrees()["ring"], config.parallel.pipeline
    found = mistakes(weights, config.sequence, again, ring=ring, pipeline=stages > 1)
    for keys, text in (*found, *mistakes_of_blocks(again, model.layers)):
        yield Problem(keys, text)
    if weights.quantize != "none" and (weights.compute_dtype or config.train.dtype) == "float16":
        text = "float16 has no range for scales; use bfloat16 or float32"
        kinds = ("weight_parallel.quantize", "weight_parallel.compute_dtype", "train.dtype")
        yield Problem(kinds, text)
    if any(rule.options().get("ignore") for rule in weights.rules):
        text = "ignore = true is for a loop of your own; internsp train steps all parameters"
        yield Problem(("weight_parallel.rules",), text)
    if weights.reduction == "mean":
        text = 'internsp train divides by all valid tokens itself; use "sum"'
        yield Problem(("weight_parallel.reduction",), text)
    if weights.grad_dtype is not None:
        text = "for loops without a ZeroOptimizer, which internsp train has; leave it out"
        yield Problem(("weight_parallel.grad_dtype",), text)
    if any("grad_dtype" in rule.options() for rule in weights.rules):
        text = "grad_dtype is for loops without a ZeroOptimizer, which internsp train has"
        yield Problem(("weight_parallel.rules",), text)
    if isinstance(weights.keep_unsharded, int) and weights.keep_unsharded > model.layers:
        text = f'there are {model.layers} blocks (model.layers); a size has a unit, as "2 GiB"'
        yield Problem(("weight_parallel.keep_unsharded", "model.layers"), text)


def _pipeline(config: Config) -> Iterator[Problem]:
    ranks, name, chunks = config.parallel.pipeline, config.pipeline.schedule, config.pipeline.chunks
    if ranks == 1:
        if chunks > 1:
            text = f"{chunks} chunks without a pipeline; set parallel.pipeline above 1, or use 1"
            yield Problem(("pipeline.chunks", "parallel.pipeline"), text)
        return
    wanted = {"GPipe": 1, "1F1B": 1, "ZBVZeroBubble": 2, "DualPipeV": 2}.get(name, chunks)
    if chunks != wanted:
        text = f'schedule "{name}" takes {wanted}, not {chunks}'
        yield Problem(("pipeline.chunks", "pipeline.schedule"), text)
    stages, layers = ranks * wanted, config.model.layers
    if layers < stages:
        text = f"{layers} blocks cannot fill {stages} stages (pipeline = {ranks} x chunks)"
        yield Problem(("model.layers", "parallel.pipeline", "pipeline.chunks"), text)
    number = config.train.micro_batches
    least = {"1F1B": ranks, "DualPipeV": stages}.get(name, 1)
    keys = ("train.micro_batches", "pipeline.schedule", "parallel.pipeline")
    if number < least:
        yield Problem(keys, f'{number} are too few for "{name}", which needs {least} or more')
    rounds = max(1, number // ranks)
    if name.startswith("Interleaved") and number % rounds:
        text = f'{number} do not fit "{name}" on {ranks} ranks; use a multiple of {ranks}'
        yield Problem(keys, text)


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer = config.optimizer
    name, rest = optimizer.name, optimizer.other_name
    if optimizer.momentum and name in ("adamw", "adafactor"):
        betas = "optimizer.betas, or " if name == "adamw" else ""
        text = f'{name} has no momentum; set {betas}optimizer.name = "sgd"'
        yield Problem(("optimizer.momentum", "optimizer.name"), text)
    unused = ["betas", "eps"] if rest != "adamw" else []
    unused += ["momentum"] if name not in OPTIMIZERS else []
    for key in unused:
        if optimizer.asks(key):
            text = f"{name} has none; leave it out"
            if name not in OPTIMIZERS:
                text = "only for adamw and sgd; for a class set it in optimizer.options"
            yield Problem((f"optimizer.{key}", "optimizer.name"), text)
    for number, group in enumerate(optimizer.groups, start=1):
        if group.optimizer not in (None, name, rest):
            both = f"{name} (optimizer.name)" + (f" or {rest} (optimizer.other)" * (rest != name))
            text = f"group {number}: {group.optimizer} is neither: give {both}"
            if rest == name:
                text = f"group {number}: optimizer.name is {name}; set optimizer.other, too"
            yield Problem(("optimizer.groups", "optimizer.other"), text)
    if optimizer.decay_steps is not None and optimizer.schedule != "wsd":
        text = f'unused with schedule = "{optimizer.schedule}"; set it to "wsd"'
        yield Problem(("optimizer.decay_steps", "optimizer.schedule"), text)


def _train(config: Config) -> Iterator[Problem]:
    train = config.train
    first, last = train.profile_steps
    if first > last:
        text = f"the first step, {first}, comes after the last, {last}"
        yield Problem(("train.profile_steps",), text)
    elif train.profile in ("torch", "memory") and first > train.steps:
        if not train.stop_after_tokens:
            text = f"the run ends with step {train.steps}, before the first of them"
            yield Problem(("train.profile_steps", "train.steps"), text)


def _report(config: Config) -> Iterator[Problem]:
    if len(set(config.report.writers)) < len(config.report.writers):
        yield Problem(("report.writers",), "one is given twice")
    try:
        empty = config.report.alert is not None and not shlex.split(config.report.alert)
    except ValueError as error:
        yield Problem(("report.alert",), f"is not words as in a shell: {error}")
    else:
        if empty:
            yield Problem(("report.alert",), "names no command")


def degrees(config: Config, world_size: int) -> Iterator[Problem]:
    """Check that the mesh fits the ranks, and the batch the mesh."""
    parallel, train = config.parallel, config.train
    whose = " (launch.processes, or torchrun's)"
    for name, text in impossible(world_size, config.degrees(), whose):
        yield Problem(_DEGREES.get(name, (f"parallel.{name}", "launch.processes")), text)
    if world_size % parallel.pipeline:
        return
    world_size //= parallel.pipeline
    data, left = divmod(world_size, parallel.sequence)
    parts = train.micro_batches * data
    if not left and train.global_batch % parts:
        small = train.global_batch < parts
        text = f"{train.global_batch} sequences are {'too few for' if small else 'no multiple of'}"
        why = f"micro_batches = {train.micro_batches} x data degree = {data}"
        keys = ("train.global_batch", "train.micro_batches", "parallel.sequence")
        yield Problem((*keys, "launch.processes"), f"{text} {parts} ({why})")


def _files(config: Config) -> Iterator[Problem]:
    yield from _folder(config)
    data, resume = config.data, config.checkpoint.named
    named = {"paths": [data], "mixture": data.mixture, "evaluation": data.evaluation}
    for key, tables in named.items():
        for path in (path for given in tables for path in given.paths):
            if mistake := _unfit_text(path):
                yield Problem((f"data.{key}",), mistake)
    if data.tokenizer != "bytes" and (mistake := _unfit_text(data.tokenizer)):
        yield Problem(("data.tokenizer",), f'{mistake} (or "bytes" for no tokenizer)')
    if resume is not None and (mistake := _missing(resume, "checkpoint")):
        yield Problem(("checkpoint.resume",), mistake)


def _unfit_text(path: str) -> str | None:
    if mistake := _missing(path, "file or folder"):
        return mistake
    if not Path(path).is_file() and not Path(path).is_dir():
        return f"neither a file nor a folder: {path} (every rank reads it from its beginning)"
    return None


def _missing(path: str, what: str) -> str | None:
    """Why ``path`` cannot be found; ``None`` if it can."""
    try:
        os.stat(path)  # Path("") would be the current folder
    except FileNotFoundError:
        return f"no such {what}: {path or '(an empty text)'}"
    except OSError as error:  # no permission for a folder above, a long name, links in a circle
        return f"cannot be read: {path}: {error.strerror}"
    return None
