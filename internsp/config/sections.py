"""The sections of a configuration: typed, frozen, checked when made.

Each section of the TOML file has a class. The text under each field is its only documentation: the
command's ``--help`` and ``configs/documented.toml`` are made from it. Nothing here imports torch,
so that ``internsp --help`` and reports of mistakes are fast.

A field that may be ``None`` is written as ``"none"`` in a file or on the command line, since TOML
has no null.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from internsp.config import hf_folder
from internsp.config.functions import checked as checked_function
from internsp.config.functions import checked_optimizer, checked_option, import_path
from internsp.config.kept import MOST_BLOCKS, checked
from internsp.config.names import below, nearest
from internsp.config.names import checked as checked_pattern

# Every number has both bounds. The upper bounds are well above what anyone trains with, and below
# the limits of clocks, 64-bit integers and Python loops, beyond which a run or a plan would hang.
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Natural = Annotated[int, Field(ge=0, le=1_000_000_000)]
Size = Annotated[int, Field(ge=1, le=1 << 24)]  # size of a dimension of the model
Few = Annotated[int, Field(ge=1, le=1 << 11)]  # number of things that plans enumerate
Degree = Annotated[int, Field(ge=1, le=1 << 20)]  # ranks
Amount = Annotated[int, Field(ge=0, le=1 << 50)]  # bytes or elements
Tiny = Annotated[float, Field(ge=1e-30, le=1)]  # added to avoid a division by zero
Depth = Annotated[int, Field(ge=0, le=64)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Blocks = Annotated[int, Field(ge=0, le=MOST_BLOCKS)]
Kept = Annotated[str | Blocks | None, BeforeValidator(checked)]
# TOML gives lists; the sections hold tuples, which are immutable, too.
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
Texts = Annotated[tuple[Text, ...], Field(strict=False, max_length=100_000)]
Pattern = Annotated[Text, AfterValidator(checked_pattern)]
Patterns = Annotated[tuple[Pattern, ...], Field(strict=False, max_length=100_000)]
Numbers = Annotated[tuple[Natural, ...], Field(strict=False, max_length=100_000)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(ge=0, le=1000)]
Dropped = Annotated[float, Field(ge=0, lt=1)]
OptimizerName = Annotated[Text, AfterValidator(checked_optimizer)]
Option = Annotated[Text, AfterValidator(checked_option)]
# One part of a path, not only dots, without control characters.
FOLDER_NAME = r"^[^/\\\x00-\x1f]*[^/\\.\x00-\x1f][^/\\\x00-\x1f]*$"
MAX_TIMEOUT_SECONDS = 30 * 24 * 3600
"""Longer timeouts overflow in torch's stores and process groups, which then wait forever."""
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Ahead = Annotated[Depth | Patterns, BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]
Function = Annotated[
    Any,
    BeforeValidator(checked_function),
    PlainSerializer(import_path),
    WithJsonSchema({"type": "string"}),
]
"""A function, or its import path ``"package.module:function"``."""


def nullable(field: FieldInfo) -> bool:
    """Whether ``None`` (written ``"none"``) is a value of ``field``."""
    union = typing.get_origin(field.annotation) in (types.UnionType, typing.Union)
    return union and type(None) in typing.get_args(field.annotation)


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        names = list(cls.model_fields)
        wrong = []
        for key in [str(k) for k in data if k not in names] if isinstance(data, Mapping) else ():
            near = nearest(key, names)
            hint = f"did you mean {near}?" if near else f"its keys: {', '.join(names)}"
            wrong.append(f"unknown key {key!r}; {hint}")
        if wrong:
            raise ValueError("; ".join(wrong))
        return data

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if "none" not in data.values():
            return data
        empty = {name for name, field in cls.model_fields.items() if nullable(field)}
        return {k: None if k in empty and v == "none" else v for k, v in data.items()}


class ModelConfig(Section):
    """The model: its shape, or the folder of one of transformers' models."""

    family: Literal["llama", "internlm2", "hf"] = "llama"
    """Family of the model zoo; hf: the causal model of transformers in path."""
    path: Text | None = None
    """Folder of a model of transformers: config.json, which decides all sizes, and safetensors."""
    vocab_size: Size = 257
    """Number of token ids; 257 is 256 bytes and the end of a document."""
    hidden_size: Size = 256
    """Width of the residual stream, in features."""
    layers: Few = 4
    """Number of transformer blocks."""
    heads: Size = 4
    """Number of query heads."""
    kv_heads: Size | None = None
    """Number of key/value heads; none: as many as query heads."""
    head_dim: Size | None = None
    """Features of one head; none: hidden_size / heads."""
    intermediate_size: Size | None = None
    """Width of the feed-forward network, in features; none: 8/3 of hidden_size, up to a 32nd."""
    rope_theta: Annotated[float, Field(ge=1, le=1e15)] = 10000.0
    """Base of the rotary embedding's wavelengths."""
    norm_eps: Tiny = 1e-5
    """Added to the mean square inside every norm."""
    tie_embeddings: bool = False
    """Let the head use the embedding's weight."""
    qkv_bias: bool = False
    """Bias in the query, key and value projections."""
    bias: bool = False
    """Bias in all other linear layers."""
    norm: Literal["torch", "apex", "auto"] = "torch"
    """Implementation of the norm; apex is NVIDIA's, auto takes it where it is importable."""
    attention: Literal["auto", "sdpa", "flash", "varlen"] = "auto"
    """Attention kernel; auto takes the fastest one present and logs its choice."""
    init_std: Annotated[float, Field(ge=1e-12, le=100)] = 0.02
    """Standard deviation of the initial weights."""
    dropout: Dropped = 0.0
    """Share of what attention and feed-forward add that training drops, the same on any mesh."""
    embedding_dropout: Dropped = 0.0
    """Share of the embeddings that training drops."""

    @model_validator(mode="before")
    @classmethod
    def _read_folder_sizes(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("path") in (None, "none"):
            return data
        family = str(data.get("family", "llama"))
        found, _ = hf_folder.sizes(str(data["path"]), family)  # mistakes are reported by the checks
        return {**found, **data}


class DocumentsConfig(Section):
    """Where documents come from, and what they are."""

    source: Literal["stdlib", "text", "jsonl", "parquet"] = "stdlib"
    """Where documents come from; stdlib is the Python standard library's own source."""
    paths: Texts = ()
    """Files or folders of the source, from the current folder; unused by stdlib."""
    text_field: Text = "text"
    """Column of the text in jsonl and parquet files."""
    format: Literal["text", "chat", "instruction"] = "text"
    """What a row of jsonl or parquet is; in chats and instructions only the answers are learned."""
    messages_field: Text = "messages"
    """Column of a chat: a list of messages, each with role and content."""
    prompt_field: Text = "prompt"
    """Column of an instruction."""
    completion_field: Text = "completion"
    """Column of its answer."""


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
    index: Literal["auto", "always", "never"] = "auto"
    """Keep tokens in an index beside each path, not in memory; auto: of paths from 64 MiB on."""
    index_dir: Text | None = None
    """Folder of the indices, on a disk that all ranks see; none: beside the data."""
    mixture: Annotated[tuple[MixturePart, ...], Field(strict=False, max_length=1000)] = ()
    """Texts to mix by weight, in place of source and paths, each a table [[data.mixture]]."""
    evaluation: Annotated[tuple[EvaluationText, ...], Field(strict=False, max_length=100)] = ()
    """Texts to evaluate on besides, each by its name, each a table [[data.evaluation]]."""


class ParallelConfig(Section):
    """Degrees of parallelism; weight and sequence degrees are independent of each other."""

    weight: Degree = 1
    """Ranks over which every large weight is sharded."""
    sequence: Degree = 1
    """Ranks over which every sequence is sharded."""
    ring: Degree | None = None
    """Of those, ranks in a ring for keys and values; none: 1, or what gives each rank a head."""
    near: Literal["heads", "ring"] = "heads"
    """Whose ranks are neighbors, on the fastest links: those that share heads, or a ring's."""
    balance: Literal["auto", "contiguous", "zigzag", "level"] = "auto"
    """How positions are dealt to the ranks of a ring, see internsp.sp.dispatch."""
    pipeline: Degree = 1
    """Pipeline stages."""
    zero: Degree | None = None
    """Ranks over which the optimizer state of a shard is sharded; none: all its replicas."""
    expert_weight: Degree | None = None
    """Ranks over which every expert's weight is sharded; none: as weight."""
    expert: Degree = 1
    """Ranks that own experts of their own (expert parallel)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes torch's accelerator where present, CUDA or any other."""
    timeout_seconds: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_SECONDS)] = 300
    """Seconds a collective may take before the run fails, up to 30 days."""

    def degrees(self, heads: int) -> dict[str, Any]:
        """Arguments of ``MeshShape`` and ``ParallelMesh.create``.

        Args:
            heads: query heads of the model.
        """
        found = self.model_dump(exclude={"device", "timeout_seconds", "balance"})
        if self.ring is None:
            rings = [n for n in range(1, self.sequence + 1) if self.sequence % n == 0]
            found["ring"] = next(n for n in rings if self.sequence // n <= max(heads, 1))
        return found


class PipelineConfig(Section):
    """The pipeline, where parallel.pipeline is above 1; micro-batches are train.micro_batches."""

    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Schedule of torch.distributed.pipelining; the last three split backward."""
    chunks: Few = 1
    """Pieces of the model on each stage's ranks; ZBVZeroBubble and DualPipeV take 2."""


Trigger = Literal["qkv", "attention", "out_proj", "mlp"]
Offload = Annotated[
    tuple[Literal["weights", "optimizer", "gradients"], ...], Field(strict=False, max_length=3)
]


class PlanRule(Section):
    """What holds for some modules or parameters alone (docs/plan.md).

    Its keys mean what they mean in ``[weight_parallel]``, of what ``match`` matches and all below
    it; a key that is not given leaves that as it is. Two rules may match one thing, but not say the
    same key of it.
    """

    match: Annotated[Patterns, BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]
    """Patterns of the names of modules, blocks or parameters; each must match something."""
    unit: Literal["each", "one"] = "each"
    """Modules in blocks that are gathered and freed by themselves: each of them, or all as one."""
    ignore: bool = False
    """Leave the parameters alone: not sharded, not replicated, with gradients of this rank only."""
    replicate_below: Amount = 0
    """Parameters of fewer bytes are replicated, others sharded; replaces min_shard_elements."""
    shard_dim: Annotated[int, Field(ge=-64, le=63)] = 0
    """Dimension on which the weights are sharded; negative ones count from the last."""
    axis: Literal["dense", "experts"] = "dense"
    """Axis of the mesh over which they are sharded; replaces experts."""
    coalesce_bytes: Amount = 65536
    """Weights up to this many bytes unsharded share collectives with their neighbors."""
    compute_dtype: Dtype | None = None
    """Dtype of gathered weights, to which the modules' inputs are cast; none: their own."""
    reduce_dtype: Dtype | None = None
    """Dtype in which gradients travel to be summed in float32; none: that of the weights' use."""
    grad_dtype: Dtype | None = None
    """Dtype of .grad of narrower parameters, without a ZeroOptimizer; none: the parameter's own."""
    output_dtype: Dtype | None = None
    """Dtype to which floating outputs of the matched modules are cast; none: as computed."""
    cast_inputs: bool = True
    """Whether floating inputs of the matched modules are cast to the compute dtype."""
    quantize: Literal["none", "int8", "fp8"] = "none"
    """What blocks' weights are gathered as, of whatever size."""
    pre_all_gather: Function = None
    """Function of a shard that returns what is sent instead of it; with post_all_gather."""
    post_all_gather: Function = None
    """Function that fills the unsharded weight from what all ranks have sent."""
    offload: Offload = ()
    """What of them lies in host memory, as in [weight_parallel]; empty: nothing."""
    reshard_after_forward: Amount = 0
    """Near ranks that keep slices of blocks' weights after a step's first all-gather; 0: none."""
    keep_unsharded: bool = False
    """Whether the blocks stay unsharded in a step; what is configured counts among the others."""
    prefetch_depth: Depth = 1
    """Blocks gathered ahead from these; there is one slot more than the largest of all blocks."""
    forward_prefetch: Ahead = 1
    """Blocks that these gather ahead in forward: how many, or patterns of names, in order."""
    backward_prefetch: Ahead = 1
    """The same in backward, whose order is the reverse."""
    trigger: Trigger = "out_proj"
    """Before what in the blocks the next one's gather starts; qkv: their entry."""
    prefetch_triggers: Patterns = ()
    """Patterns of the module names in the blocks to trigger at; empty: those of the trigger."""

    @model_validator(mode="after")
    def _check_not_empty(self) -> PlanRule:
        if not self.match or not self.options():
            raise ValueError("a rule needs at least one pattern in match, and one more key")
        said = self.options().keys()
        if len(said & {"pre_all_gather", "post_all_gather"}) == 1:
            raise ValueError("pre_all_gather and post_all_gather need each other: give both")
        if "prefetch_depth" in said and said & {"forward_prefetch", "backward_prefetch"}:
            raise ValueError(
                "prefetch_depth sets both forward_prefetch and backward_prefetch: give it, or them"
            )
        return self

    @model_serializer(mode="wrap")
    def _dump_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        given = {k: v for k, v in dump(self).items() if k in self.model_fields_set}
        return {key: "none" if value is None else value for key, value in given.items()}

    def options(self) -> dict[str, Any]:
        """The options that the rule sets, by key."""
        given = (k for k in type(self).model_fields if k in self.model_fields_set and k != "match")
        return {key: getattr(self, key) for key in given}

    def __str__(self) -> str:
        return f"the rule for {', '.join(map(repr, self.match))}"


class WeightParallelConfig(Section):
    """How weights are gathered, kept unsharded and released."""

    overlap: bool = True
    """Gather the next weights while the current ones compute; same numbers either way."""
    memory_pool: bool = True
    """Keep unsharded weights in preallocated slots."""
    prefetch_depth: Depth = 1
    """Blocks gathered ahead; they take prefetch_depth + 1 slots, so that 0 has the lowest peak."""
    trigger: Literal["qkv", "attention", "out_proj", "mlp", "rolling"] = "out_proj"
    """Before what in a block the next one's gather starts; qkv: its entry; rolling: by weight."""
    granularity: Literal["block", "module"] = "block"
    """What is gathered and awaited together."""
    prefetch_triggers: Patterns = ()
    """Patterns of the module names to trigger at; empty: the defaults of the trigger."""
    blocks: Patterns = ()
    """Patterns of the block names ("layers.*"); empty: the defaults of known families."""
    experts: Patterns = ("experts",)
    """Patterns of consecutive parts of the names of experts' parameters."""
    plan: Annotated[tuple[PlanRule, ...], Field(strict=False, max_length=1000)] = ()
    """Rules for some modules or parameters alone, each a table [[weight_parallel.plan]]."""
    reshard_after_forward: Amount = 0
    """Near ranks that keep slices of blocks' weights after a step's first all-gather; 0: none."""
    keep_unsharded: Kept = None
    """Blocks of a chunk that stay unsharded in a step: none, a number, a size ("2 GiB"), or all."""
    accumulation: Literal["sharded", "full"] = "sharded"
    """Gradients of micro-batches: each reduced into shards, or summed unsharded, reduced once."""
    min_shard_elements: Amount = 2048
    """Parameters with fewer elements are replicated, not sharded."""
    coalesce_bytes: Amount = 65536
    """Weights up to this many bytes unsharded share collectives with their neighbors."""
    pending_blocks: Few = 2
    """Unsharded gradients in flight, in blocks; the oldest is finished at the limit."""
    unexpected_order: Literal["error", "gather", "learn"] = "error"
    """Blocks in another order than declared: stop; gather each as it comes; or the first step's."""
    embedding_cut: Literal["vocabulary", "hidden"] = "vocabulary"
    """Dimension on which the embedding is sharded."""
    head_output: Literal["local", "gather", "vocabulary"] = "local"
    """Logits of the own tokens, of all tokens of the group, or of a vocabulary shard."""
    cuts_own_sequences: bool = False
    """Allow a sequence degree above 1 without DistributedAttention: the model needs or has none."""
    exchange_in_parts: bool = True
    """Over gloo, exchange attention's heads in messages that travel while products are made."""
    ring_form: Literal["auto", "ring", "reverse", "double", "direct"] = "auto"
    """How keys and values travel around parallel.ring; auto: as the busiest rank sends least."""
    inner_ring: Degree = 1
    """Ranks of an inner ring, with ring_form = "double": those with fast links to each other."""
    compare_ranks: bool = True
    """When a model is made parallel: compare the first values of the ranks by checksums."""
    compile: bool = False
    """Compile every block with torch.compile; needs trigger = "qkv" or "rolling"."""
    reduction: Literal["sum", "mean"] = "sum"
    """Gradients over ranks: sum for a loss divided by all valid tokens, mean for mean losses."""
    reduce_dtype: Dtype | None = None
    """Dtype in which gradients travel to be summed in float32; none: that of the weights' use."""
    quantize: Literal["none", "int8", "fp8"] = "none"
    """What blocks' large weights are gathered as: rounded, with a scale for 128 elements."""
    quantize_min_elements: Amount = 16384
    """Weights with fewer elements, the embedding's and the head's are not quantized."""
    compute_dtype: Dtype | None = None
    """Dtype of gathered weights, to which floating inputs are cast; none: the parameter's own."""
    cast_inputs: bool = True
    """Whether the model's floating inputs are cast to compute_dtype."""
    own_dtype: Patterns = ()
    """Patterns, as experts, of parameters that compute and travel in their own dtype."""
    grad_dtype: Dtype | None = None
    """Dtype of .grad of narrower parameters, without a ZeroOptimizer; none: the parameter's own."""
    offload: Offload = ()
    """What of sharded parameters is in host memory: weights, optimizer state, gradients (sums)."""


class ActivationCheckpointConfig(Section):
    """What of the blocks' activations is computed again in backward instead of kept."""

    mode: Literal["none", "full", "selective"] = "none"
    """full recomputes a block; selective keeps attention output and exchanged tensors."""
    fraction: Fraction = 1.0
    """Share of the blocks, the first ones, from 0 to 1; unused where blocks is given."""
    blocks: Numbers | None = None
    """Indices of the blocks, from 0; none: as fraction says."""
    reentrant: bool = False
    """Use torch's reentrant form."""
    offload: Kept = None
    """Recomputing blocks that keep in host memory: none, a number, what "2 GiB" hold, or all."""
    tiles: Literal["auto"] | Few = 1
    """Tiles of positions in which feed-forwards compute, one after another; auto: by the length."""
    tiled: Patterns = ()
    """Patterns of the modules in blocks that compute in tiles; empty: usual feed-forwards."""

    def selected(self, number_of_blocks: int) -> tuple[int, ...]:
        """Sorted indices of the blocks that recompute, out of ``number_of_blocks``."""
        if self.mode == "none":
            return ()
        if self.blocks is not None:
            return tuple(sorted(set(self.blocks)))
        return tuple(range(round(self.fraction * number_of_blocks)))


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
    """Which of optimizer.name and optimizer.rest steps them; none: as without this group."""

    @model_validator(mode="after")
    def _check_not_empty(self) -> ParameterGroup:
        if not self.match or (self.lr, self.weight_decay, self.optimizer) == (None, None, None):
            raise ValueError("needs match, and lr, weight_decay or optimizer")
        return self


class OptimizerConfig(Section):
    """The optimizer and its schedule, which begins with a linear warm-up."""

    name: OptimizerName = "adamw"
    """Optimizer of the shards: adamw, sgd, adafactor, muon, or a class "package.module:Class"."""
    rest: Literal["adamw"] | None = None
    """Optimizer of all but the blocks' matrices; none: name's own, and adamw where that is muon."""
    rest_lr: Rate | None = None
    """Highest learning rate of optimizer.rest; none: optimizer.lr."""
    whole_matrix: bool | None = None
    """Whether a step of the class needs whole matrices; none: if it is muon or adafactor."""
    options: Annotated[tuple[Option, ...], Field(strict=False, max_length=100)] = ()
    """More arguments of the class, each a text "name = value", as TOML."""
    lr: Rate = 3e-4
    """Highest learning rate, reached after the warm-up."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Decay of adamw's first and second moment, also where that is optimizer.rest."""
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
    loss_scale_growth_interval: Count = 1000
    """Steps without overflow after which the loss scale doubles."""

    @property
    def rest_name(self) -> str:
        """The optimizer of all parameters except the blocks' matrices."""
        return self.rest or ("adamw" if self.name == "muon" else self.name)

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
        return self.name if matrix else self.rest_name

    @property
    def momentum_used(self) -> float:
        """The momentum of sgd or muon, with its default."""
        if self.momentum is not None:
            return self.momentum
        return 0.95 if self.name == "muon" else 0.0


class TrainConfig(Section):
    """The training loop."""

    name: Annotated[str, Field(pattern=FOLDER_NAME, max_length=200)] = "run"
    """Name of the run; its files go to runs/<name>/."""
    steps: Count = 100
    """Optimizer steps."""
    tokens: Annotated[int, Field(ge=0, le=1 << 60)] = 0
    """Stop after so many tokens that the loss counts, in place of steps; 0: by steps."""
    global_batch: Size = 8
    """Sequences of an optimizer step, over all ranks and micro-batches."""
    micro_batches: Size = 1
    """Parts into which each rank's share of the batch is split to save memory."""
    batch_tokens: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    """Sequences of a step: as many as have so many tokens that the loss counts; 0: global_batch."""
    seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = 0
    """Seed of the weights and of the data order."""
    dtype: Dtype = "float32"
    """Dtype of parameters and activations; 16-bit ones get float32 master weights."""
    eval_every: Natural = 0
    """Steps between evaluations; 0: only at the end."""
    eval_batches: Annotated[int, Field(ge=0, le=1_000_000)] = 4
    """Batches of global_batch sequences of each text in an evaluation; 0: none."""
    eval_average: bool = False
    """Report the mean of the texts' evaluation losses, too; early_stop goes by it."""
    sample_bytes: Annotated[int, Field(ge=0, le=1_000_000)] = 200
    """Tokens of the sample generated at the end; 0: none."""
    sample_prompt: Annotated[str, Field(max_length=1_000_000)] = "def "
    """Text that the sample continues; empty: it begins a document."""
    peak_tflops: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """TFLOP/s of a device at most, for MFU; none: what is known of it, for 16-bit training."""
    profile: bool = False
    """Write the step that the report shows as a Chrome/Perfetto trace, a file a rank."""
    torch_profile: Annotated[tuple[Count, Count], Field(strict=False)] | None = None
    """Steps, first and last, over which torch's profiler writes a trace, a file a rank."""
    memory_snapshot: bool = False
    """Write CUDA's allocations over the same steps, a file a rank."""
    deterministic: bool = False
    """Take deterministic kernels only; an operation that has none ends the run."""
    max_skipped_steps: Count = 10
    """Stop after so many steps in a row whose gradients were not finite; none of them is taken."""
    compare_replicas: Natural = 0
    """Steps between comparisons of all replicas of the weights, bit for bit; 0: none."""
    loss_spike: Annotated[float, Field(ge=0, le=1e6)] = 2.0
    """Tell of a loss above so many times the median of the last 50 steps; 0: never."""
    norm_spike: Annotated[float, Field(ge=0, le=1e6)] = 10.0
    """The same of the gradient norm."""
    early_stop: Natural = 0
    """Stop after so many evaluations in a row without a lower held-out loss; 0: never."""
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
    peer: bool = False
    """Under torchrun: copies of what ranks save, in the memory of the next machine or this one."""
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
    """Where metrics go beside metrics.jsonl and the page."""

    writers: Annotated[
        tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False, max_length=2)
    ] = ()
    """Programs that get every row too, into folders of the run; extras of the same names."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """Whether Weights & Biases sends; offline: files alone, for wandb sync, and no connection."""
    wandb_project: Annotated[Text, Field(min_length=1)] = "internsp"
    """Project of Weights & Biases."""
    wandb_entity: Text | None = None
    """User or team of Weights & Biases; none: the one who is logged in."""


class LaunchConfig(Section):
    """Local processes, where no launcher such as torchrun started this one."""

    processes: Degree = 1
    """Processes to start on this machine."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Computing threads of a process."""
