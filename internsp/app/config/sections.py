"""The sections of a run's configuration that the application alone reads."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)

from internsp.base.names import FOLDER_NAME, below, nearest
from internsp.config.former import INSTRUCTION
from internsp.config.functions import _IMPORT_PATH
from internsp.config.sections import (
    MAX_TIMEOUT_SECONDS,
    Count,
    Degree,
    Dtype,
    Few,
    Fraction,
    Natural,
    Patterns,
    Section,
    SequenceConfig,
    Size,
    Text,
    Texts,
    Tiny,
)

OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon")
"""Optimizers that have names in the configuration."""


def checked_optimizer(name: str) -> str:
    """``name`` if it is a named optimizer or an import path; nothing is imported yet."""
    if name in OPTIMIZERS or _IMPORT_PATH.fullmatch(name):
        return name
    near = nearest(name, OPTIMIZERS)
    hint = f" (did you mean {near}?)" if near else ""
    raise ValueError(f'give {", ".join(OPTIMIZERS)}, or a class as "package.module:Class"{hint}')


def options(texts: Iterable[str]) -> dict[str, Any]:
    """The arguments in ``texts``, by name."""
    found: dict[str, Any] = {}
    for text in texts:
        try:
            given = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            given = {}
        if len(given) != 1 or "\n" in text:
            raise ValueError('write an argument as "name = value", a text in quotes')
        found |= given
    return found


Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(ge=0, le=1000)]
OptimizerName = Annotated[Text, AfterValidator(checked_optimizer)]
Option = Annotated[Text, AfterValidator(lambda text: options([text]) and text)]


def _no_instruction(value: Any) -> Any:
    if value == "instruction":
        raise ValueError(INSTRUCTION)
    return value


class DocumentsConfig(Section):
    """Where documents come from, and what they are."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "datasets", "tokens"] = "stdlib"
    """Where documents come from. stdlib is Python's own source, datasets a folder that the package
    datasets has saved, tokens a .bin file with its .idx."""
    paths: Texts = ()
    """Files or folders of the source, from the current folder; unused by stdlib."""
    text_field: Text = "text"
    """Column of the text in jsonl, parquet and datasets."""
    format: Annotated[Literal["text", "chat"], BeforeValidator(_no_instruction)] = "text"
    """What a row of jsonl, parquet and datasets is; of a chat only the answers are learned."""
    messages_field: Text = "messages"
    """Column of a chat: a list of messages, each with role and content."""


class MixturePart(DocumentsConfig):
    """One of the texts that are mixed."""

    name: Annotated[str, Field(max_length=200)] = ""
    """What metrics call it; empty: its first path."""
    weight: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Its share of the sequences, as a ratio to the others' weights."""

    @property
    def called(self) -> str:
        """Name of the text: ``name``, else its first path, else its source."""
        return self.name or (self.paths[0] if self.paths else self.source)


class EvaluationText(DocumentsConfig):
    """A text to evaluate on, of which nothing is trained on."""

    name: Annotated[str, Field(pattern=FOLDER_NAME, max_length=100)]
    """What metrics call it."""


class DataConfig(DocumentsConfig):
    """The text to train on."""

    tokenizer: Text = "bytes"
    """bytes, a file of the tokenizers library (JSON), or a folder that transformers reads."""
    sequence_length: Annotated[int, Field(ge=2, le=1 << 31)] = 1024
    """Length of a sequence, in tokens, over all ranks of a sequence group."""
    pack: bool = True
    """Pack documents into one sequence, each attending only within itself; false: pad each."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of documents kept for the evaluation loss, from 0 to below 1."""
    cache_dir: Annotated[Text, Field(min_length=1)] | None = None
    """Folder for the tokens of all paths, on a disk that all ranks see. Without it tokens of paths
    of 64 MiB or more are beside their path, others in memory."""
    mixture: Annotated[tuple[MixturePart, ...], Field(strict=False, max_length=1000)] = ()
    """Texts to mix by weight, in place of source and paths, each a table [[data.mixture]]."""
    evaluation: Annotated[tuple[EvaluationText, ...], Field(strict=False, max_length=100)] = ()
    """Texts to evaluate on besides, each by its name, each a table [[data.evaluation]]."""


class ParallelConfig(Section):
    """Degrees of parallelism; weight and sequence degrees are independent of each other."""

    weight: Degree = 1
    """Each large weight is split over this many ranks. Raise it until weights, gradients and
    optimizer state fit."""
    sequence: Degree = 1
    """Each sequence is split over this many ranks. Raise it when activations of one sequence do not
    fit."""
    pipeline: Degree = 1
    """Pipeline stages."""
    optimizer_ranks: Degree | None = None
    """Over how many ranks each shard's optimizer state is split further. "none" uses all replicas
    and saves most memory; 1 saves traffic."""
    expert_weight: Degree | None = None
    """Each expert's weight is split over this many ranks. "none" uses parallel.weight."""
    expert: Degree | Literal["auto"] = 1
    """Ranks among which the experts are divided, each owning its own. With 1 every rank has a shard
    of every expert; "auto" gives each of expert_weight ranks its own if that sends fewer bytes."""
    fast_links: Literal["expert_weight", "expert"] = "expert_weight"
    """Which of the two gets the neighboring ranks where both are above 1. Choose "expert" if those
    are on faster links: tokens are waited for, weights come a block ahead."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes torch's accelerator where present, CUDA or any other."""
    timeout_seconds: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_SECONDS)] = 300
    """Seconds a collective may take before the run fails, up to 30 days."""


class SequenceSection(SequenceConfig):
    """How a sequence is split over its ranks, where parallel.sequence is above 1."""

    ring: Degree | None = None
    """Ranks of parallel.sequence that pass keys and values around instead of exchanging heads.
    Needed when there are more ranks than heads; "none" chooses."""
    fast_links: Literal["heads", "ring"] = "heads"
    """Which of the two exchanges gets the neighboring ranks. Choose "ring" if keys and values are
    the larger traffic."""
    balance: Literal["auto", "contiguous", "zigzag", "level"] = "auto"
    """How positions are dealt out so that causal attention is equal work for all ranks. "auto" is
    right unless you compare."""

    def of_model(self) -> SequenceConfig:
        """What ``parallelize`` takes of the section; the mesh and the data take the rest."""
        return SequenceConfig(**{key: getattr(self, key) for key in SequenceConfig.model_fields})


class PipelineConfig(Section):
    """The pipeline, where parallel.pipeline is above 1; micro-batches are train.micro_batches."""

    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Schedule of torch.distributed.pipelining; the last three split backward."""
    chunks: Few = 1
    """Pieces of the model that each stage holds; ZBVZeroBubble and DualPipeV take 2. More pieces
    mean shorter idle times and more messages."""


class ParameterGroup(Section):
    """Settings of some parameters alone; what matches no group has those of ``[optimizer]``.

    Of several groups that match a parameter the first one holds.
    """

    match: Annotated[Patterns, BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]
    """Patterns of the names of parameters, or of modules above them; each must match something."""
    lr: Rate | None = None
    """Highest learning rate; none: optimizer.lr. The schedule is that of all."""
    weight_decay: Rate | None = None
    """Weight decay; none: optimizer.weight_decay, and 0 for norms and biases."""
    optimizer: OptimizerName | None = None
    """Which of optimizer.name and optimizer.other steps them; none: as without this group."""

    @model_validator(mode="after")
    def _check_not_empty(self) -> ParameterGroup:
        if not self.match or (self.lr, self.weight_decay, self.optimizer) == (None, None, None):
            raise ValueError("needs match, and lr, weight_decay or optimizer")
        return self


class OptimizerConfig(Section):
    """The optimizer and its schedule, which begins with a linear warm-up."""

    name: OptimizerName = "adamw"
    """Optimizer of the shards: adamw, sgd, adafactor, muon, or a class "package.module:Class"."""
    other: Literal["adamw"] | None = None
    """Optimizer for embeddings, head, norms and biases when name is made for matrices. "none" is
    the same, and adamw beside muon."""
    options: Annotated[tuple[Option, ...], Field(strict=False, max_length=100)] = ()
    """More arguments of the class, each a text "name = value", as TOML. On a device adamw and sgd
    have "fused = true", so that the host waits for no step."""
    lr: Rate = 3e-4
    """Highest learning rate, reached after the warm-up."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Decay of adamw's first and second moment, also where that is optimizer.other."""
    eps: Tiny = 1e-8
    """Added to adamw's denominator."""
    weight_decay: Rate = 0.1
    """Weight decay (decoupled in adamw); norms and biases have none."""
    momentum: Beta | None = None
    """Momentum; none: 0 of sgd, 0.95 of muon."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False, max_length=1000)] = ()
    """Parameters with settings of their own, each a table [[optimizer.groups]]."""
    max_grad_norm: Annotated[float, Field(ge=1e-12, le=1e12)] | None = 1.0
    """Clip the global gradient norm to this; none: do not clip."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """Learning rate after the warm-up; wsd (warm-up, stable, decay) stays, then falls linearly."""
    warmup_steps: Natural = 20
    """Optimizer steps of the warm-up."""
    decay_steps: Natural | None = None
    """Steps of wsd's decay, the last ones; none: a tenth of train.steps."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the last step, or (inverse_sqrt) the lowest one, as a share of lr."""
    loss_scale_init: Annotated[float, Field(ge=1, le=2**24)] = 65536.0
    """First loss scale, for float16; it never leaves the range from 1 to 2**24."""

    @property
    def other_name(self) -> str:
        """The optimizer of all parameters except the blocks' matrices."""
        return self.other or ("adamw" if self.name == "muon" else self.name)

    def group_of(self, name: str) -> ParameterGroup | None:
        """The group whose settings a parameter has; ``None`` if no group matches it."""
        found = (g for g in self.groups if any(below(name, pattern) for pattern in g.match))
        return next(found, None)

    def stepped_by(self, name: str, matrix: bool) -> str:
        """Which optimizer steps a parameter.

        Args:
            matrix: whether it is a matrix in a block, and not an embedding.
        """
        own = self.group_of(name)
        if own is not None and own.optimizer is not None:
            return own.optimizer
        return self.name if matrix else self.other_name

    @property
    def momentum_used(self) -> float:
        """The momentum of sgd or muon, with its default."""
        if self.momentum is not None:
            return self.momentum
        return 0.95 if self.name == "muon" else 0.0

    @property
    def moments(self) -> int:
        """Values that the optimizer keeps per element of a weight; of an imported class, two.

        For adafactor 0: it keeps rows and columns only. muon's are those of matrices in blocks.
        """
        return {"sgd": int(self.momentum_used > 0), "muon": 1, "adafactor": 0}.get(self.name, 2)


class TrainConfig(Section):
    """The training loop."""

    name: Annotated[str, Field(pattern=FOLDER_NAME, max_length=200)] = "run"
    """Name of the run; its files go to runs/<name>/."""
    steps: Count = 100
    """Optimizer steps."""
    stop_after_tokens: Annotated[int, Field(ge=0, le=1 << 60)] = 0
    """Stop after so many tokens that the loss counts, in place of steps; 0: by steps."""
    global_batch: Size = 8
    """Sequences of an optimizer step, over all ranks and micro-batches."""
    micro_batches: Size = 1
    """Parts into which each rank's share of the batch is split to save memory."""
    batch_tokens: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    """End a step's batch at the sequence that reaches this many counted tokens. Use it for padded
    chats, whose sequences differ in length; 0 uses global_batch."""
    seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = 0
    """Seed of the weights, of the data order and of what a model draws."""
    dtype: Dtype = "float32"
    """Dtype of parameters and activations; 16-bit ones get float32 master weights."""
    eval_every: Natural = 0
    """Steps between evaluations; 0: only at the end."""
    eval_batches: Annotated[int, Field(ge=0, le=1_000_000)] = 4
    """Batches of global_batch sequences of each text in an evaluation; 0: none."""
    peak_tflops: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """TFLOP/s of a device at most, for MFU; none: what is known of it, for 16-bit training."""
    profile: Literal["none", "timeline", "torch", "memory"] = "none"
    """Write a file a rank: the report's step, a trace of torch's profiler, CUDA's allocations."""
    profile_steps: Annotated[tuple[Count, Count], Field(strict=False)] = (3, 5)
    """Steps, first and last, of the profiles "torch" and "memory"."""
    deterministic: bool = False
    """Take deterministic kernels only; an operation that has none ends the run."""
    max_skipped_steps: Count = 10
    """Stop after so many steps in a row whose gradients were not finite; none of them is taken."""
    compare_replicas_every: Natural = 0
    """Steps between comparisons of all replicas of the weights, bit for bit; 0: none."""
    log_every: Count = 1
    """Steps between printed lines; metrics.jsonl has every step."""
    loss_chunk: Count = 1024
    """Tokens whose logits exist at once in the loss."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    save: bool = True
    """Save at the end, and when the run is stopped."""
    every: Natural = 0
    """Steps between checkpoints; 0: none between."""
    keep_last: Natural = 0
    """Checkpoints that are kept, the newest ones; 0: all."""
    keep_every: Natural = 0
    """Steps whose multiples are kept besides; 0: none."""
    resume: Text | None = None
    """Path to go on from, auto (the run's own newest one), or never; none: auto under torchrun."""

    def from_own_folder(self, elastic: bool) -> bool:
        """Whether the run resumes from its own folder."""
        return self.resume == "auto" or (self.resume is None and elastic)

    @property
    def named(self) -> str | None:
        """The configured path of a checkpoint; ``None`` if there is none."""
        return None if self.resume in ("auto", "never") else self.resume


class ReportConfig(Section):
    """Where metrics and alerts go beside metrics.jsonl and the page."""

    writers: Annotated[
        tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False, max_length=2)
    ] = ()
    """Programs that get every row too, into folders of the run; extras of the same names."""
    alert: Annotated[Text, Field(min_length=1)] | None = None
    """Command to run with a message: at a failure, a skipped step, a spike, a slow rank."""


class LaunchConfig(Section):
    """Local processes, where no launcher such as torchrun started this one."""

    processes: Degree = 1
    """Processes to start on this machine."""
