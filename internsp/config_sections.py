"""The sections of a configuration: typed, frozen, checked at birth.

One class a section of the TOML file. The text under each field is its only documentation: the
command's ``--help`` and ``configs/documented.toml`` are made from it. Nothing here imports torch,
so that ``internsp --help`` and a report of mistakes are immediate.

A field that may be ``None`` is written as ``"none"`` in a file or on the command line, since TOML
has no null.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# TOML gives lists; the models hold tuples, which are frozen too.
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Numbers = Annotated[tuple[Natural, ...], Field(strict=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


def nullable(field: FieldInfo) -> bool:
    """Whether ``None`` (written ``"none"``) is a value of ``field``."""
    union = typing.get_origin(field.annotation) in (types.UnionType, typing.Union)
    return union and type(None) in typing.get_args(field.annotation)


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_a_word(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        empty = {name for name, field in cls.model_fields.items() if nullable(field)}
        return {k: None if k in empty and v == "none" else v for k, v in data.items()}


class ModelConfig(Section):
    """The shape of the model."""

    family: Literal["llama", "internlm2"] = "llama"
    """Family of the model zoo."""
    vocab_size: Count = 257
    """Number of token ids; 257 is 256 bytes and the end of a document."""
    hidden_size: Count = 256
    """Width of the residual stream, in features."""
    layers: Count = 4
    """Number of transformer blocks."""
    heads: Count = 4
    """Number of query heads."""
    kv_heads: Count | None = None
    """Number of key/value heads; none: as many as query heads."""
    head_dim: Count | None = None
    """Features of one head; none: hidden_size / heads."""
    intermediate_size: Count | None = None
    """Width of the feed-forward network, in features; none: 8/3 of hidden_size, up to a 32nd."""
    rope_theta: Positive = 10000.0
    """Base of the rotary embedding's wavelengths."""
    norm_eps: Positive = 1e-5
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
    init_std: Positive = 0.02
    """Standard deviation of the initial weights."""


class DataConfig(Section):
    """The text to train on."""

    source: Literal["stdlib", "text", "jsonl", "parquet"] = "stdlib"
    """Where documents come from; stdlib is the Python standard library's own source."""
    paths: Texts = ()
    """Files or folders of the source, from the current folder; unused by stdlib."""
    text_field: str = "text"
    """Column of the text in jsonl and parquet files."""
    tokenizer: str = "bytes"
    """bytes, or the path of a file of the tokenizers library (JSON)."""
    sequence_length: Count = 1024
    """Length of a sequence, in tokens, over all ranks of a sequence group."""
    pack: bool = True
    """Pack documents into one sequence; each attends only within itself."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of documents kept for the evaluation loss, from 0 to below 1."""


class ParallelConfig(Section):
    """Degrees of parallelism; weight and sequence degrees are independent of each other."""

    weight: Count = 1
    """Ranks over which every large weight is cut."""
    sequence: Count = 1
    """Ranks over which every sequence is cut."""
    pipeline: Count = 1
    """Pipeline stages."""
    zero: Count | None = None
    """Ranks over which the optimizer state of a shard is cut; none: all its replicas."""
    expert_weight: Count | None = None
    """Ranks over which every expert's weight is cut; none: as weight."""
    expert: Count = 1
    """Ranks that own experts of their own (expert parallel)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes CUDA where present."""
    timeout_seconds: Count = 300
    """Seconds a collective may take before the run fails."""

    def degrees(self) -> dict[str, Any]:
        """Arguments of ``MeshShape`` and ``ParallelMesh.create``."""
        return self.model_dump(exclude={"device", "timeout_seconds"})


class PipelineConfig(Section):
    """The pipeline, where parallel.pipeline is above 1; micro-batches are train.micro_batches."""

    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Schedule of torch.distributed.pipelining; the last three split backward."""
    chunks: Count = 1
    """Pieces of the model on each stage's ranks; ZBVZeroBubble and DualPipeV take 2."""


class WeightParallelConfig(Section):
    """How whole weights come, stay and go."""

    overlap: bool = True
    """Gather the next weights while the current ones compute; same numbers either way."""
    memory_pool: bool = True
    """Keep whole weights in preallocated slots."""
    prefetch_depth: Count = 1
    """Blocks gathered ahead; whole block weights take prefetch_depth + 1 slots."""
    trigger: Literal["qkv", "attention", "out_proj", "mlp", "rolling"] = "out_proj"
    """Before what in a block the next one's gather starts; qkv: its entry; rolling: by weight."""
    granularity: Literal["block", "module"] = "block"
    """What is gathered and awaited together."""
    anchors: Texts = ()
    """Glob patterns of the module names to trigger at; empty: the defaults of the trigger."""
    blocks: Texts = ()
    """Glob patterns of the block names; empty: the defaults of known families."""
    experts: Texts = ("experts",)
    """Glob patterns of consecutive parts of the names of experts' parameters."""
    keep_between_micro_batches: bool = False
    """Keep blocks whole until the optimizer step: a slot for every block of a pipeline chunk."""
    resident_blocks: Natural = 0
    """Blocks of each pipeline chunk that stay whole until the optimizer step, spread evenly."""
    resident_bytes: Natural = 0
    """In place of resident_blocks: as many as take no more than this memory beside the slots."""
    accumulation: Literal["sharded", "full"] = "sharded"
    """Gradients of micro-batches: reduced in each into shards, or summed whole and reduced once."""
    min_shard_elements: Natural = 2048
    """Parameters with fewer elements are replicated, not cut."""
    together_bytes: Natural = 65536
    """Whole weights up to this many bytes share one gather and one reduction with neighbours."""
    pending_blocks: Count = 2
    """Whole gradients in flight, in blocks; the oldest is drained at the limit."""
    unexpected_order: Literal["error", "gather"] = "error"
    """When blocks run in another order than declared: stop, or gather without prefetch."""
    embedding_cut: Literal["vocabulary", "hidden"] = "vocabulary"
    """Dimension on which the embedding is cut."""
    head_output: Literal["local", "gather", "vocabulary"] = "local"
    """Logits of the own tokens, of all tokens of the group, or of a vocabulary shard."""
    cuts_own_sequences: bool = False
    """Allow a sequence degree above 1 without DistributedAttention: the model needs or has none."""
    compare_ranks: bool = True
    """When a model is made parallel: compare the first values of the ranks by checksums."""
    compile: bool = False
    """Compile every block with torch.compile; needs trigger = "qkv" or "rolling"."""
    reduction: Literal["sum", "mean"] = "sum"
    """Gradients over ranks: sum for a loss divided by all valid tokens, mean for mean losses."""
    reduce_dtype: Dtype | None = None
    """Dtype in which gradients travel to be summed in float32; none: that of the weights' use."""
    codec: Literal["none", "int8", "fp8"] = "none"
    """What blocks' large weights are gathered as: rounded, with a scale for 128 elements."""
    codec_min_elements: Natural = 16384
    """Weights with fewer elements, the embedding's and the head's are not coded."""
    compute_dtype: Dtype | None = None
    """Dtype of gathered weights, to which floating inputs are cast; none: the parameter's own."""


class ActivationCheckpointConfig(Section):
    """Which blocks recompute their activations in backward."""

    mode: Literal["none", "full", "selective"] = "none"
    """full recomputes a block; selective keeps attention output and exchanged tensors."""
    fraction: Fraction = 1.0
    """Share of the blocks, the first ones, from 0 to 1; unused where blocks is given."""
    blocks: Numbers | None = None
    """Indices of the blocks, from 0; none: as fraction says."""
    reentrant: bool = False
    """Use torch's reentrant form."""

    def selected(self, number_of_blocks: int) -> tuple[int, ...]:
        """Sorted indices of the blocks that recompute, out of ``number_of_blocks``."""
        if self.mode == "none":
            return ()
        if self.blocks is not None:
            return tuple(sorted(set(self.blocks)))
        return tuple(range(round(self.fraction * number_of_blocks)))


class OptimizerConfig(Section):
    """The optimizer and its schedule: linear warm-up, then a cosine down to the last step."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Torch optimizer that runs on the shards."""
    lr: NonNegative = 3e-4
    """Highest learning rate, reached after the warm-up."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Decay of adamw's first and second moment."""
    eps: Positive = 1e-8
    """Added to adamw's denominator."""
    weight_decay: NonNegative = 0.1
    """Weight decay (decoupled in adamw); norms and biases have none."""
    momentum: Beta = 0.0
    """Momentum of sgd."""
    max_grad_norm: Positive | None = 1.0
    """Clip the global gradient norm to this; none: do not clip."""
    warmup_steps: Natural = 20
    """Optimizer steps of the warm-up."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the last step, as a share of lr."""
    loss_scale_init: Positive = 65536.0
    """First loss scale, for float16."""
    loss_scale_growth_interval: Count = 1000
    """Steps without overflow after which the loss scale doubles."""


class TrainConfig(Section):
    """The training loop."""

    name: Annotated[str, Field(pattern=r"^[^/\\]*[^/\\.][^/\\]*$")] = "run"
    """Name of the run; its files go to runs/<name>/."""
    steps: Count = 100
    """Optimizer steps."""
    global_batch: Count = 8
    """Sequences of an optimizer step, over all ranks and micro-batches."""
    micro_batches: Count = 1
    """Parts into which each rank's share of the batch is cut to save memory."""
    seed: Natural = 0
    """Seed of the weights and of the data order."""
    dtype: Dtype = "float32"
    """Dtype of parameters and activations; 16-bit ones get float32 master weights."""
    eval_every: Natural = 0
    """Steps between evaluations; 0: only at the end."""
    eval_batches: Natural = 4
    """Batches of global_batch sequences in an evaluation; 0: none."""
    sample_bytes: Natural = 200
    """Tokens of the sample generated at the end; 0: none."""
    sample_prompt: str = "def "
    """Text that the sample continues."""
    profile: bool = False
    """Write the step that the report shows as a Chrome/Perfetto trace, a file a rank."""
    max_skipped_steps: Count = 10
    """Stop after so many steps in a row whose gradients were not finite; none of them is taken."""
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
    resume: str | None = None
    """Path of a checkpoint to go on from, on the same mesh; none: start afresh."""


class LaunchConfig(Section):
    """Local processes, where no launcher such as torchrun started this one."""

    processes: Count = 1
    """Processes to start on this machine."""
    threads: Count = 1
    """Computing threads of a process."""
