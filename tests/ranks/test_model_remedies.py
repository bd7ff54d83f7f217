"""Every remedy that errors about a model and its options name is run, as in test_remedies.py.

A function runs the remedy on two ranks and compares every gradient with one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from internsp.config import ActivationCheckpointConfig, PlanRule, WeightParallelConfig
from internsp.mesh.shape import MeshShape
from internsp.parallel.parallelize import examine
from tests.ranks.test_remedies import right
from tests.ranks.test_rolling import Sometimes
from tests.ranks.test_rules_memory import Borrowing
from tests.support.meshes import mesh_of
from tests.support.models import Block, Tiny, Twin
from tests.support.ranks import ranks
from tests.support.remedies import Remedy, Table, require_complete, run

# ranks that differ


def differing(**options: Any) -> Tiny:
    """A model of other first values on each rank."""
    torch.manual_seed(dist.get_rank())
    return Tiny(**options)


def broadcast(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)


def loaded(model: Any) -> None:
    torch.manual_seed(4)
    model.load_state_dict(Tiny(layers=2).double().state_dict())


def unequal_counts() -> None:
    twin = Twin(partial(Tiny, layers=2), mesh_of(2))
    (ids, labels), _ = twin.batch()
    own = slice(0, 1) if twin.mesh.rank == 0 else slice(1, None)
    (twin.plain(ids, labels) / labels.numel()).backward()
    (twin.ours(ids[own], labels[own]) / labels.numel()).backward()
    twin.check_gradients("a sum over unequal counts")


# models without the usual names, and rules of their own


class Stacked(Tiny):
    """Its blocks are in ``stack``, a name that is not a usual one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stack = self._modules.pop("layers")

    @property
    def layers(self) -> Any:  # type: ignore[override]
        return self.stack


class Untriggered(Block):
    """Its out-projection is ``last``, a name that is not a usual one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self._modules.pop("wo")

    @property
    def wo(self) -> Any:  # type: ignore[override]
        return self.last


def with_rules(given: Any) -> Any:
    return type("Ruled", (Tiny,), {"weight_parallel_plan": given})


def tied_experts(model: Any) -> None:
    model.layers[1].w1.weight = model.layers[0].w1.weight


def borrowing(**options: Any) -> Tiny:
    return Borrowing()


def four(**options: Any) -> Tiny:
    return Tiny(layers=4)


KEEP = {"keep_unsharded": True}
SMALL_BLOCKS = [{"match": "layers", "min_shard_elements": 9999}]
WITH_EXPERTS = {"weight": 2, "expert_weight": 1}
EACH_Q = [{"match": "layers.*.q", "unit": "each"}]
plans = partial(partial, right)
ruled = partial(plans, four)


def compiled_with_a_rule() -> None:
    """Another rule of the same block than one of its trigger; compiled it is in other tests."""
    plan = [{"match": "layers.0", "gather_before": "qkv", "prefetch_depth": 2}]
    config = WeightParallelConfig(compile=True, gather_before="qkv", rules=plan)
    examine(Tiny(), config, None, MeshShape(2, weight=2))


def used_again(**config: Any) -> None:
    """A weight is used twice in a later forward."""
    twin = Twin(partial(Tiny, Sometimes), mesh_of(2), **config)
    for twice in (False, True):
        for model in (twin.plain, twin.ours):
            model.layers[0].twice = twice  # type: ignore[index, union-attr, assignment]
        twin.backward()
        twin.check_gradients(f"used {'twice' if twice else 'once'}")
        twin.zero_grad()


def recomputing(mode: str = "full", **options: Any) -> Any:
    return plans(checkpoint=ActivationCheckpointConfig(mode=mode, **options))  # type: ignore


def tiled(tiles: int = 2, module: str = "w2", **config: Any) -> None:
    right(checkpoint=ActivationCheckpointConfig(tiles=tiles, tiled_modules=[module]), **config)


OWN_GATHERS = (
    "tests/ranks/test_own_communicator.py::"
    "test_the_communicator_of_the_document_trains_as_one_process"
)
ONE_ATTENTION = "tests/ranks/test_parity.py::test_loss_and_every_gradient_equal_one_process"
OWN_ATTENTION = (
    "tests/ranks/test_agreement.py::test_a_sequence_degree_needs_an_attention_that_knows_of_it"
)
UNITS = "tests/ranks/test_units.py::"
EACH = UNITS + "test_attention_and_feed_forward_apart_train_as_on_one_process"
LEARNED = (
    "tests/ranks/test_learned_order.py::"
    "test_a_learned_order_trains_as_one_process_and_runs_as_its_plan_says"
)
COMPILED = (
    "tests/ranks/test_rules_compile.py::test_compiled_blocks_equal_eager_with_the_same_messages"
)
ROUNDED = "tests/ranks/test_quantize.py::test_loss_and_every_gradient_are_those_of_rounded_weights"
OFFLOADED = (
    "tests/ranks/test_offload.py::test_a_plain_loop_accumulates_clips_and_steps_as_one_process"
)

OWN_CLASS = "tests/ranks/test_own_class.py::"
PARALLEL: Table = {
    "{reason}; make the mesh with expert = 1": {
        "make the mesh with expert = 1":
            "tests/ranks/test_experts_state.py::"
            "test_owners_that_a_model_does_not_declare_are_refused_on_all_ranks",
    },
    "freeze and unfreeze the same parameters on all ranks": {
        "freeze and unfreeze the same parameters on all ranks":
            "tests/ranks/test_unfreezing.py::"
            "test_stages_that_are_unfrozen_train_as_on_one_process",
    },
    "was added after parallelize(), so that no rank would share": {
        "build the whole model first, adapters included":
            "tests/ranks/test_dtypes.py::"
            "test_fp32_adapters_train_over_a_frozen_bf16_base_as_on_one_process",
    },
    "the ranks were given different {subject}": {
        "call parallelize() with the same model and configuration on every rank": right,
    },
    "whose shards are of a class of their own": {
        "build the model with values":
            f"{OWN_CLASS}test_a_base_of_codes_trains_adapters_as_on_one_process",
        "initialize others by load_state_dict":
            f"{OWN_CLASS}test_a_state_dict_has_the_shards_and_is_loaded_from_another_model",
    },
    "reduction = 'mean' needs equally many tokens": {
        "divide a sum by the number of valid tokens over all ranks": unequal_counts,
    },
    "starts with other values on ranks": {
        "seed every rank alike before the model is made": right,
        "broadcast": partial(right, differing, before=broadcast),
        "load its values before parallelize()": partial(right, differing, before=loaded),
        "weight_parallel.compare_ranks = false if they are written afterwards":
            partial(right, differing, after=loaded, compare_ranks=False),
    },
    "communicator is a {type(communicator).__name__}": {"give a WPCommunicator": OWN_GATHERS},
    "where no hook of ours may run (WP-13)": {
        "(WP-13): set weight_parallel.gather_before = 'qkv' (the block's entry) and no": COMPILED,
        "and the same in rules": compiled_with_a_rule,
    },
    "learns an order of blocks, but a rule of the plan makes": {
        # either of the two that contradict each other
        "leave one out": EACH, "learns an order of blocks": LEARNED,
    },
    "parallelize() was given a {type(value)": {
        "call parallelize(model, mesh, WeightParallelConfig(...), sequence": right,
        "ParallelMesh.from_device_mesh makes a mesh":
            "tests/ranks/test_device_mesh.py::"
            "test_a_model_trained_on_a_users_mesh_is_one_processs_after_steps",
    },
    "a communicator of your own reads shards on the device": {
        "offload nothing": OWN_GATHERS, "take the library's communicator": OFFLOADED,
    },
    "a communicator of your own decides what travels": {
        "quantize nothing": OWN_GATHERS, "take the library's communicator": ROUNDED,
    },
    "Compute attention by an internsp.DistributedAttention": {
        "Compute attention by an internsp.DistributedAttention": ONE_ATTENTION,
        "make the mesh with sequence = 1": right,
        "set sequence.own_attention = true": OWN_ATTENTION,
    },
    "is carried out by the model's own loss, but a": {
        "give it one and call internsp.token_loss(..., **self.loss_options)": OWN_ATTENTION,
        "leave head_output = 'local'": OWN_ATTENTION,
    },
    "sequence.own_attention = True has no effect": {"leave it out": ONE_ATTENTION},
}  # fmt: skip
OWNERS = "tests/ranks/test_experts.py::test_gradients_norms_and_steps_equal_one_process"
RULES = (
    "tests/ranks/test_plan_rules.py::"
    "test_gradients_are_one_process_whatever_the_rules_and_the_plan_is_what_runs"
)
QUANTIZED_BY_RULE = (
    "tests/ranks/test_plan_rules.py::"
    "test_weights_quantized_by_rule_in_two_ways_are_rounded_and_no_others"
)
SLICES = (
    "tests/ranks/test_near_slices.py::"
    "test_gathers_from_slices_train_as_one_process_and_bring_what_the_plan_says"
)
CODES = f"{OWN_CLASS}test_a_base_of_codes_trains_adapters_as_on_one_process"
STRUCTURE: Table = {
    "of which shards are rows": {"leave out shard_dim": CODES},
    "which only ranks can call, on values": {
        "Call internsp.parallelize in a loop of your own": CODES, "hold a plain parameter": right,
    },
    "(fsdp_pre_all_gather): leave one out": {"leave one out": CODES},
    "of which no slices are kept, no trained shard in host memory": {
        "leave out near_ranks": CODES, "memory_pool = false": CODES,
    },
    "does not declare that it sends": {
        "Make the mesh with expert = 1 and shard all experts over expert_weight": OWNERS,
        "expert_ranks = mesh.expert on the module that does so": OWNERS,
    },
    "the model declares expert_ranks =": {
        "build the model for the mesh's expert degree, or the mesh for the model's": OWNERS
    },
    "is an expert's and a scalar": {
        "give it a dimension":
            "tests/ranks/test_experts_state.py::"
            "test_even_small_parameters_of_owned_experts_are_cut_and_never_summed_over_owners",
    },
    "an expert's weight is shared with another module": {
        "untie it": plans(degrees=WITH_EXPERTS, expert_parameters=["layers.0.w1"]),
        "change weight_parallel.expert_parameters":
            plans(before=tied_experts, degrees=WITH_EXPERTS, expert_parameters=["layers.*.w1"]),
    },
    "set {key}, candidates": {
        "weight_parallel.gather_before_modules":
            plans(partial(Tiny, Untriggered), gather_before_modules=["last"]),
        "gather_before_modules in its rule":
            plans(rules=[{"match": "layers.0", "gather_before_modules": ["w2"]}]),
    },
    "it has none: set gather_before": {
        "set gather_before = 'qkv', its entry, in a rule for it":
            plans(blocks=["layers.*", "head"], rules=[{"match": "head", "gather_before": "qkv"}]),
    },
    "no transformer blocks found by the usual names": {
        "set weight_parallel.blocks": plans(Stacked, blocks=["stack.*"]),
    },
    "a weight belongs to one unit; make the patterns": {
        "match one level only, and have a rule of weight_parallel.rules set unit":
            plans(blocks=["layers.*"], rules=EACH_Q),
    },
    # options without an effect
    "no parameter of the model is sharded": {
        "lower min_shard_elements": plans(prefetch_depth=2),
        "leave the option out": plans(min_shard_elements=1 << 40),
    },
    "(or expert), or leave the option out": {
        "make it with expert_weight (or expert)":
            plans(degrees=WITH_EXPERTS, expert_parameters=["layers.*.w1"]),
        "leave the option out": right,
    },
    "other than those of which rules say": {
        "Lower it": ROUNDED, "name weights in a rule with quantize": QUANTIZED_BY_RULE,
    },
    "no block has a sharded parameter; leave": {"leave it out": plans(rules=SMALL_BLOCKS)},
    "rules or classes say what every weight of the blocks": {"leave it out": QUANTIZED_BY_RULE},
    "is a unit already: leave": {
        "leave it out": plans(rules=[{"match": "layers.*.q", "unit": "each"}]),
    },
    "rules decide it for every block": {
        "leave one of them out": plans(rules=[{"match": "layers.0", **KEEP}], keep_unsharded=1),
    },
    "all blocks stay unsharded (keep_unsharded": {
        'keep_unsharded = "all"': plans(keep_unsharded="all"), "leave one of them out": SLICES,
    },
    "nothing is cast without weight_parallel.compute_dtype": {
        "set that, too": plans(compute_dtype="float64", cast_inputs=False),
    },
    '= "experts" has no effect: the mesh': {
        "make it with expert_weight (or expert)":
            plans(degrees=WITH_EXPERTS, rules=[{"match": "layers.*.w1", "axis": "experts"}]),
        "leave it out": right,
    },
    "has no effect beside gather_before_modules": {
        "leave one out": plans(rules=[{"match": "layers.0", "gather_before": "mlp"}]),
        "which replace it": plans(rules=[{"match": "layers.0", "gather_before_modules": ["w2"]}]),
    },
    "has no effect: what rules quantize or pack": {"leave it out": QUANTIZED_BY_RULE},
    "ranks, all of them near, and gradients are summed": {"leave it out": right},
    "has no effect: the blocks stay unsharded, so": {
        "leave it out": plans(rules=[{"match": "layers", **KEEP}]),
    },
    "has no effect: the blocks have no sharded parameter": {
        "leave it out": plans(rules=SMALL_BLOCKS),
    },
    "has no effect: no block comes after": {"leave it out": right},
    # units and their rules
    "lies in no block (they are": {
        "name it in weight_parallel.blocks":
            plans(blocks=["layers.*", "head"], gather_before="qkv"),
    },
    "is set twice, by": {
        "let their patterns match different things": plans(rules=[
            {"match": f"layers.{i}", "prefetch_depth": i} for i in range(2)
        ]),
    },
    "and prefetch_depth is for both directions": {
        "leave one of them out": ruled(rules=[{"match": "layers.1", "prefetch_depth": 2}]),
        "prefetch_depth of": ruled(rules=[{"match": "layers.1", "forward_prefetch": 2}]),
    },
    "weight_parallel_plan of {type(model).__name__} is a": {
        "give a list of rules (internsp.PlanRule": plans(
            with_rules([PlanRule(match="layers.0", prefetch_depth=0)])
        ),
        "or mappings)": plans(with_rules([{"match": "layers.0", "prefetch_depth": 0}])),
        "or a method that returns one":
            plans(with_rules(lambda self: [{"match": "layers.0", "prefetch_depth": 0}])),
    },
    "weight_parallel_plan of {type(model).__name__}: rule": {
        "give an internsp.PlanRule or a mapping of its keys":
            plans(with_rules([{"match": "layers.0", "prefetch_depth": 0}])),
    },
    "activation_checkpoint.tiles: no feed-forward": {
        "name it in activation_checkpoint.tiled_modules": tiled,
    },
    "which parallelize() does not know: give": {"give a number of tiles": tiled},
    "follow from all tokens of a forward": {
        "use 1": "tests/ranks/test_experts.py::test_gradients_norms_and_steps_equal_one_process",
        "or name what may be tiled in activation_checkpoint.tiled_modules": tiled,
    },
    "whose tiles would gather it each": {
        "out of activation_checkpoint.tiled_modules": partial(tiled, rules=EACH_Q),
        "or the unit out of the plan": tiled,
    },
    "has a unit that is not a block (unit in": {"leave the rule out": COMPILED},
    "of which a smaller near group is": {
        "choose one of these": SLICES,
        "or 0 (for near_ranks, keep_unsharded keeps blocks unsharded)":
            plans(near_ranks=0, keep_unsharded="all"),
    },
    "gathers each weight as soon as there is room": {
        "choose another trigger for all": plans(rules=[{"match": "layers.0", "prefetch_depth": 2}]),
    },
    "gathers each weight alone, one ahead": {
        'set granularity = "block"': plans(rules=[{"match": "layers.0", "coalesce_bytes": 400}]),
    },
    "holds none of the blocks, the smallest": {
        "give more": plans(keep_unsharded="1 MiB"), "a number of blocks": plans(keep_unsharded=1),
        "or leave it out": right,
    },
}  # fmt: skip
PACKED = (
    "tests/ranks/test_own_gather.py::"
    "test_every_gradient_and_step_is_that_of_what_the_functions_make_of_the_weights"
)
RETURNED = (
    "tests/ranks/test_own_gather.py::test_a_weight_that_is_returned_is_copied_into_its_slot"
)
EXTENDED = (
    "tests/ranks/test_fsdp_extensions.py::"
    "test_classes_that_gather_themselves_train_as_under_fsdp2"
)
SCHEDULE: Table = {
    "the pre_all_gather of {name}, gave a": {
        "give a tensor":
            "tests/ranks/test_own_gather.py::"
            "test_gradients_of_a_plain_loop_and_functions_of_one_tensor",
        "or a tuple of tensors": PACKED,
    },
    "returned {kind} where the unsharded weight is": {
        "write it into the second argument": PACKED,
        "or return a tensor of this shape and dtype": RETURNED,
    },
    "the same for every rank. It": {"write every rank's own rows": PACKED},
    "fsdp_pre_all_gather or fsdp_post_all_gather of": {
        "return a tuple of tensors to send, and metadata, from the first": EXTENDED,
        "the weight and a tuple of tensors from the second": EXTENDED,
    },
    "is not a plain contiguous tensor, as those are": {
        "give the class __tensor_flatten__ and __tensor_unflatten__": EXTENDED,
        "and contiguous tensors": EXTENDED,
    },
    "for a shard {list(shard.shape)} on the meta device": {
        "return tensors of the right shapes and dtypes there": PACKED
    },
    "weight_parallel.quantize cannot take": {
        "compute in {known}": ROUNDED, "set weight_parallel.quantize = 'none'": right,
    },
    "blocks must run in the declared order and use": {
        "blocks must run in the declared order": right,
        "use a weight no more often than in a forward before":
            "tests/ranks/test_rolling.py::"
            "test_a_second_use_that_comes_unexpectedly_names_both_holders_and_is_known_afterwards",
        'gather_before = "out_proj"': partial(used_again, gather_before="out_proj"),
        "unexpected_order = 'gather'": plans(borrowing, unexpected_order="gather"),
    },
}  # fmt: skip
RINGS = "tests/ranks/test_sp_ring.py::test_every_form_equals_one_process"
DOUBLE = "tests/ranks/test_double_ring.py::test_loss_and_every_gradient_equal_one_process"
IN_A_FILE = (
    "tests/unit/test_plan_rules.py::test_rules_are_written_and_read_again_as_they_were_given"
)
def meshes(world: int, **sizes: int) -> Remedy:
    """A mesh that can be."""
    return partial(MeshShape, world, **sizes)  # type: ignore[return-value]


CONFIG: Table = {
    '"learn" in a pipeline': {
        "declare them as they run and leave it out":
            "tests/ranks/test_pipeline_parity.py::"
            "test_loss_every_gradient_and_every_message_are_as_they_should_be",
    },
    "is less than one; raise": {
        "raise it": recomputing(fraction=0.5), "set blocks instead": recomputing(blocks=(0,)),
    },
    "gathers weight by weight in any case": {
        'use granularity = "block"': plans(gather_before="rolling"),
    },
    'unused with gather_before = "rolling"': {
        "remove them": plans(gather_before="rolling"),
        "or choose another": plans(gather_before_modules=["w2"]),
    },
    'unused with granularity = "module"': {"leave it out": plans(granularity="module")},
    "of a ring of one rank": {
        "make a mesh with a ring": RINGS, 'or use "auto"': ONE_ATTENTION,
    },
    "torch's reentrant form cannot be selective": {
        "set it to false": recomputing(mode="selective"),
        'or mode = "full"': recomputing(reentrant=True),
    },
    "a compiled block cannot compute in tiles": {
        "set tiles = 1": COMPILED, "or compile = false": tiled,
    },
    "unused with one tile": {"set activation_checkpoint.tiles": tiled},
    "decides when weights are gathered": {
        "leave it out": OWN_GATHERS, "take the library's": RULES,
    },
    "lies inside a compiled block": {
        'use gather_before = "qkv" or "rolling" and no gather_before_modules': COMPILED
    },
    "so there is no saved input to offload": {
        'set mode to "full"':
            "tests/ranks/test_activation_offload.py::"
            "test_loss_every_gradient_and_a_step_equal_one_process",
    },
    "unused where activation_checkpoint.blocks is given": {
        "leave one of them out": recomputing(fraction=0.5),
        "activation_checkpoint.blocks": recomputing(blocks=(0,)),
    },
    "is unused with gather_before_modules, which": {
        "remove one": plans(gather_before="mlp"),
        "gather_before_modules": plans(gather_before_modules=["w2"]),
    },
    "{inner} is of no effect with": {
        'set ring_form = "double"': DOUBLE, "or leave it out": RINGS,
    },
    "no block recomputes; set mode": {
        "set mode to {modes}": recomputing(reentrant=True),
        '"full" or "selective"': recomputing(mode="selective", blocks=(0,)),
        "or leave it out": right,
    },
    "recomputes no block then": {
        'set mode = "none"': recomputing(mode="none"), "or raise it": recomputing(fraction=0.5),
        "or name some": recomputing(blocks=(1,)),
    },
    "choose one of {choices}": {"choose one of": DOUBLE},
    'use ring_form = "ring"': {'use ring_form = "ring"': RINGS},
    "give a function, or its import path": {
        "give a function": PACKED, 'or its import path "package.module:function"': PACKED,
    },
    "{why}; set model.family": {
        'set model.family = "hf"':
            "tests/ranks/test_train_hf.py::"
            "test_a_folder_trains_as_on_one_process_and_as_its_documents_one_by_one",
    },
    "pre_all_gather and post_all_gather need": {"give both": PACKED},
    "prefetch_depth sets both": {
        "give it": ruled(rules=[{"match": "layers.1", "prefetch_depth": 2}]),
        "or them": ruled(rules=[
            {"match": "layers.1", "forward_prefetch": 2, "backward_prefetch": 0}
        ]),
    },
    "write a rule, [[weight_parallel.rules]]": {
        "write a rule":
            "tests/unit/test_config.py::test_a_key_that_was_is_answered_with_what_it_became",
    },
    "write [[optimizer.groups]]": {
        "write [[optimizer.groups]] with match":
            "tests/ranks/test_optimizers.py::"
            "test_any_elementwise_class_with_groups_by_pattern_steps_as_torch_does",
    },
    "rows of two columns are chats of two messages": {
        "convert them once":
            "tests/unit/test_chat.py::"
            "test_a_chat_is_what_its_template_says_and_the_assistants_words_count",
    },
    "call trainer.stop() in a callback": {
        "call trainer.stop() in a callback's on_evaluation":
            "tests/ranks/test_trainer.py::"
            "test_callbacks_are_told_in_order_on_every_rank_and_one_rank_may_stop_all",
    },
    "no rank keeps copies for another": {
        "leave it out":
            "tests/ranks/test_elastic.py::"
            "test_a_run_goes_on_by_itself_after_a_rank_died_and_ends_with_the_same_bytes",
    },
    "is a list of tables": {"write [[{name}]] for each": IN_A_FILE},
    "one of {_divisors(world)}": {"choose one of": meshes(4, pipeline=2)},
    "one of {_divisors(world // pipeline)}": {"choose one of": meshes(4, tensor=2)},
    "{degrees[name]} {where}": {"choose one of": meshes(4, weight=2)},
    "one of {_divisors(sequence)}": {"choose one of": meshes(4, sequence=4, ring=2)},
    "one of {_divisors(replicas)}": {"choose one of": meshes(4, weight=2, zero=2)},
    "{text}; choose a product": {"choose a product among": meshes(4, expert=2)},
    "together with an axis for experts": {
        "shard the experts' weights over the same ranks as all others": meshes(4, tensor=2),
    },
}  # fmt: skip
TABLES = {"parallel": PARALLEL, "structure": STRUCTURE, "schedule": SCHEDULE, "config": CONFIG}


@pytest.mark.parametrize("room", TABLES)
def test_what_errors_say_to_do_is_in_the_table(room: str) -> None:
    require_complete([room], TABLES[room])


@pytest.mark.parametrize("room", TABLES)
@ranks(2)
def test_a_remedy_that_an_error_names_works(room: str) -> None:
    run(TABLES[room])
