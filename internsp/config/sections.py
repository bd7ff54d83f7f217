"""The sections of a configuration that a model needs: typed, frozen, checked when made.

Each section of the TOML file has a class. The text under each field is its only documentation: the
command's ``--help`` and ``configs/documented.toml`` are made from it. Nothing here imports torch,
so that ``internsp --help`` and reports of mistakes are fast.

A field that may be ``None`` is written as ``"none"`` in a file or on the command line, since TOML
has no null.
"""

from __future__ import annotations

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
    ValidationError,
    model_serializer,
    model_validator,
)

from internsp.base.names import ANY_TEXT
from internsp.base.names import checked as checked_pattern
from internsp.config.functions import checked as checked_function
from internsp.config.functions import import_path
from internsp.config.kept import MOST_BLOCKS, checked
from internsp.config.keys import ProgramOnly, nullable
from internsp.errors import ConfigError

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
Text = Annotated[str, Field(max_length=4096, pattern=ANY_TEXT)]
Texts = Annotated[tuple[Text, ...], Field(strict=False, max_length=100_000)]
Pattern = Annotated[Text, AfterValidator(checked_pattern)]
Patterns = Annotated[tuple[Pattern, ...], Field(strict=False, max_length=100_000)]
Numbers = Annotated[tuple[Natural, ...], Field(strict=False, max_length=100_000)]
Dropped = Annotated[float, Field(ge=0, lt=1)]
MAX_TIMEOUT_SECONDS = 30 * 24 * 3600
"""Longer timeouts overflow in torch's stores and process groups, which then wait forever."""
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Function = Annotated[
    Any,
    BeforeValidator(checked_function),
    PlainSerializer(import_path),
]
"""A function, or its import path ``"package.module:function"``."""


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion of types.

    Raises:
        ConfigError: values are wrong; lists all mistakes in the words of a file's, one a line.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            from internsp.config.words import all_mistakes

            raise ConfigError(all_mistakes(type(self), values, error)) from None

    # Sections within a section are validated as all of pydantic's are, so that one error has all
    # mistakes.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def asks(self, key: str) -> bool:
        """Whether an option has another value than its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "none" not in data.values():
            return data
        empty = {name for name, field in cls.model_fields.items() if nullable(field)}
        return {k: None if k in empty and v == "none" else v for k, v in data.items()}


Trigger = Literal["qkv", "attention", "out_proj", "mlp"]
Offload = Annotated[
    tuple[Literal["weights", "optimizer", "gradients"], ...], Field(strict=False, max_length=3)
]


class PlanRule(Section):
    """What holds for some modules or parameters alone (docs/howto/rules.md).

    Its keys mean what they mean in ``[weight_parallel]``, of what ``match`` matches and all below
    it; a key that is not given leaves that as it is. Two rules may match one thing, but not say the
    same key of it.
    """

    match: Annotated[Patterns, BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]
    """Patterns of the names of modules, blocks or parameters; each must match something."""
    unit: Literal["each"] = "each"
    """Modules in blocks, each of which is gathered and freed by itself."""
    ignore: bool = False
    """Leave the parameters alone: not sharded, not replicated, with gradients of this rank only."""
    min_shard_elements: Amount = 2048
    """Parameters with fewer elements are replicated, others sharded, also with one dimension."""
    shard_dim: Annotated[int, Field(ge=-64, le=63)] = 0
    """Dimension on which the weights are sharded; negative ones count from the last."""
    axis: Literal["dense", "experts"] = "dense"
    """Axis of the mesh over which they are sharded; replaces expert_parameters."""
    coalesce_bytes: Amount = 65536
    """Weights up to this many bytes unsharded share collectives with their neighbors."""
    compute_dtype: Dtype | None = None
    """Dtype of gathered weights, to which the modules' inputs are cast; none: their own."""
    reduce_dtype: Dtype | None = None
    """Dtype in which gradients travel, to be summed in float32 (by reduce = "backend" in it); none:
    that of the weights' use."""
    grad_dtype: Dtype | None = None
    """Dtype of .grad of narrower parameters, without a ZeroOptimizer; none: the parameter's own."""
    output_dtype: Dtype | None = None
    """Dtype to which floating outputs of the matched modules are cast; none: as computed."""
    cast_inputs: bool = True
    """Whether floating inputs of the matched modules are cast to the compute dtype."""
    quantize: Literal["none", "int8", "fp8"] = "none"
    """What blocks' weights are gathered as, of whatever size."""
    pre_all_gather: Annotated[Function, ProgramOnly] = None
    """Function of a shard that returns what is sent instead of it; with post_all_gather."""
    post_all_gather: Annotated[Function, ProgramOnly] = None
    """Function that fills the unsharded weight from what all ranks have sent."""
    offload: Offload = ()
    """What of them lies in host memory, as in [weight_parallel]; empty: nothing."""
    near_ranks: Amount = 0
    """Near ranks that keep slices of blocks' weights after a step's first all-gather; 0: none."""
    keep_unsharded: bool = False
    """Whether the blocks stay unsharded in a step; what is configured counts among the others."""
    prefetch_depth: Depth = 1
    """Blocks gathered ahead from these; there is one slot more than the largest of all blocks."""
    forward_prefetch: Annotated[Depth, ProgramOnly] = 1
    """How many blocks these gather ahead in forward; after the last one comes the head."""
    backward_prefetch: Annotated[Depth, ProgramOnly] = 1
    """The same in backward, whose order is the reverse."""
    gather_before: Trigger = "out_proj"
    """Before what in the blocks the next one's gather starts; qkv: their entry."""
    gather_before_modules: Patterns = ()
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
    """How many blocks ahead weights are gathered. Each costs the memory of one block; 0 needs least
    and hides nothing."""
    gather_before: Literal["qkv", "attention", "out_proj", "mlp", "rolling"] = "out_proj"
    """The point in a block at which the next one's gather starts; qkv: its entry; rolling: by
    weight. Earlier hides more, later competes less with attention's exchanges."""
    granularity: Literal["block", "module"] = "block"
    """Gather a whole block at once, or each module by itself. "module" needs less memory and sends
    more messages."""
    gather_before_modules: Patterns = ()
    """Patterns of the modules before which the next gather starts; empty: the usual names of
    gather_before. Give it for models whose modules are named unlike the zoo's."""
    blocks: Patterns = ()
    """Patterns of the names of the repeated blocks, such as "layers.*"; empty: usual names. Give it
    if your model's blocks are not found by themselves."""
    expert_parameters: Patterns = ("experts",)
    """Parts of names that mark an expert's parameters. They follow parallel.expert_weight instead
    of parallel.weight."""
    rules: Annotated[tuple[PlanRule, ...], Field(strict=False, max_length=1000)] = ()
    """Rules for single modules or parameters, each a table [[weight_parallel.rules]] with match.
    What a rule does not say stays as set here."""
    near_ranks: Amount = 0
    """After a step's first gather, so many ranks keep the weights among themselves; 0: none do.
    Backward then gathers over the fast links only, for the memory of those slices."""
    reduce: Literal["auto", "backend"] | Amount = "auto"
    """Near ranks that sum gradients first; "auto": a machine's; 0: at once, for equally fast links.
    "backend" takes its reduce-scatter, which adds in reduce_dtype: for less memory on a device."""
    keep_unsharded: Kept = None
    """Blocks that stay whole from forward to backward: a number, a size ("2 GiB"), or all. Spends
    memory to save the second gather."""
    accumulation: Literal["sharded", "full"] = "sharded"
    """With micro-batches: sum gradients as shards, or whole and reduce once. "full" sends less and
    needs the memory of all gradients."""
    min_shard_elements: Amount = 2048
    """Parameters with fewer elements are copied to every rank. Raise it where splitting small ones
    costs more in messages than it saves in memory."""
    coalesce_bytes: Amount = 65536
    """Weights up to this size share one message with their neighbors. Raise it on links with a high
    latency."""
    reductions_in_flight: Few = 2
    """How many blocks' gradients may be on their way at once. At the limit the oldest is awaited;
    more hides more and needs memory."""
    unexpected_order: Literal["error", "gather", "learn"] = "error"
    """What to do when blocks run in another order than declared. "error" stops with the names,
    "gather" goes on without gathering ahead, "learn" takes the order of the first step."""
    compare_ranks: Annotated[bool, ProgramOnly] = True
    """When a model is made parallel: compare the first values of the ranks by checksums; and, with
    reduction = "mean", the sizes of their first batches."""
    compile: bool = False
    """Compile every block with torch.compile; needs gather_before = "qkv" or "rolling"."""
    reduction: Literal["sum", "mean"] = "sum"
    """Whether gradients of the ranks are added or averaged. Add if your loss divides by all ranks'
    tokens; average if each rank divides by its own."""
    reduce_dtype: Dtype | None = None
    """Number format of gradients on the link; they are added in float32, by reduce = "backend" in
    this one. A narrower one halves traffic; "none" is that in which the weights compute."""
    quantize: Literal["none", "int8", "fp8"] = "none"
    """Send large weights rounded to eight bits, with a scale for every 128 values. Halves traffic
    of bfloat16; losses change slightly."""
    compute_dtype: Dtype | None = None
    """Number format in which gathered weights compute. "none" leaves each parameter's own."""
    cast_inputs: bool = True
    """Whether the model's floating inputs are cast to compute_dtype."""
    grad_dtype: Dtype | None = None
    """Number format of .grad, for an optimizer of your own. ZeroOptimizer sums in float32 and does
    not need it."""
    offload: Offload = ()
    """What lives in host memory between its uses: weights, optimizer, gradients. Saves device
    memory for time on the host link."""

    def asks(self, key: str) -> bool:
        """See :class:`Section`; sums at once ask for nothing."""
        return super().asks(key) and (key, getattr(self, key)) != ("reduce", 0)


class SequenceConfig(Section):
    """How the ranks of a sequence group compute, where parallel.sequence is above 1."""

    own_attention: bool = False
    """Allow split sequences although no attention of ours was found. Set it only if the model
    exchanges tokens itself or needs none."""
    exchange_in_parts: bool = True
    """On CPUs (gloo), send attention's heads in parts while products are computed. Has no effect on
    a device."""
    ring_form: Literal["auto", "ring", "reverse", "double", "direct"] = "auto"
    """The route of keys and values around the ring. "auto" takes the one in which the busiest rank
    sends least."""
    inner_ring: Degree = 1
    """With ring_form = "double": ranks of the inner ring, which pass around first. Use the number
    of ranks with fast links."""
    head_output: Literal["local", "gather", "vocabulary"] = "local"
    """Which logits the head returns: of this rank's tokens, of the whole group's, or of a part of
    the vocabulary. "vocabulary" needs least memory and its own loss."""


class ActivationCheckpointConfig(Section):
    """What of the blocks' activations is computed again in backward instead of kept."""

    mode: Literal["none", "full", "selective"] = "none"
    """Whether blocks are computed again in backward instead of keeping activations. "selective"
    keeps attention's results, so that nothing is exchanged twice."""
    fraction: Fraction = 1.0
    """Share of the blocks, the first ones, from 0 to 1; unused where blocks is given."""
    blocks: Numbers | None = None
    """Indices of the blocks, from 0; none: as fraction says."""
    reentrant: Annotated[bool, ProgramOnly] = False
    """Use torch's reentrant form."""
    offload: Kept = None
    """Recomputed blocks whose inputs wait in host memory: a number, what "2 GiB" hold, or all.
    Needed for depths at which the inputs alone do not fit."""
    tiles: Literal["auto"] | Few = 1
    """Compute feed-forwards over this many parts of the sequence, one after another; auto: by its
    length. Their memory then stops growing with length."""
    tiled_modules: Patterns = ()
    """Patterns of the modules in blocks that compute in tiles; empty: usual feed-forwards."""

    def selected(self, number_of_blocks: int) -> tuple[int, ...]:
        """Sorted indices of the blocks that recompute, out of ``number_of_blocks``."""
        if self.mode == "none":
            return ()
        if self.blocks is not None:
            return tuple(sorted(set(self.blocks)))
        return tuple(range(round(self.fraction * number_of_blocks)))
