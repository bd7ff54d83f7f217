"""What errors of the rooms below say to do is run by the tests that these tables name.

A row has a piece of a text, and for each remedy in it the words that name it and the test that does
it and compares, or a function here. Rooms that train models have tables in `tests/ranks`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from internsp.mesh.shape import MeshShape
from tests.ranks import test_model_remedies, test_optim_remedies, test_remedies
from tests.support.remedies import NO_ADVICE, NOT_RUN, Remedy, Table, require_complete, run
from tests.unit import test_app_remedies
from tests.unit.test_structure import FLOORS

SP_UNIT = "tests/unit/test_sp_attention.py::"
FORMULA = SP_UNIT + "test_attention_equals_the_formula_with_its_gradients"
FORMS = "tests/ranks/test_sp_attention.py::test_every_form_of_attention_equals_one_process"
LAYOUT = "tests/unit/test_sp_layout.py::"
SHARES = LAYOUT + "test_labels_positions_and_counts_of_every_share_are_those_of_the_whole"
RANGES = "tests/unit/test_sp_ranges.py::"
RECOMPUTED = (
    "tests/ranks/test_sp_checkpointing.py::"
    "test_checkpointing_keeps_the_numbers_and_selective_repeats_no_exchange"
)
LOSSES = "tests/ranks/test_sp_loss.py::test_every_output_mode_equals_one_process"
HF = "tests/ranks/test_hf.py::"
HF_RIGHT = HF + "test_losses_gradients_and_steps_are_those_of_one_process"
WHOLE = HF + "test_what_cut_sequences_refuse_is_right_where_they_are_whole"
OWN_LOSS = HF + "test_a_loss_of_the_users_own_from_this_ranks_logits_is_right_to_the_last_bits"
OTHER_WAYS = HF + "test_other_ways_of_calling_are_served_too"
SP: Table = {
    "hides every key": {"give 1 or more": FORMULA, "or None": FORMULA},
    "but this DistributedAttention is rank": {
        "Attach the sequence group (attach)": FORMS, "or make the layout for it": FORMULA,
    },
    "was called without the layout that": {
        "pass it, as attend(q, k, v, layout)":
            "tests/ranks/test_same_batch.py::"
            "test_an_attention_without_the_models_layout_is_refused_by_name",
    },
    "was written to in place after it was made": {
        "Write to a clone":
            "tests/ranks/test_sp_checkpointing.py::"
            "test_a_kept_result_that_was_written_to_is_never_replayed",
    },
    "where its forward did not. A": {"A block must run the same operators both times": RECOMPUTED},
    "No balance {balance} of positions": {
        "choose one of":
            RANGES + "test_every_position_is_held_once_and_costs_are_those_of_the_pairs",
    },
    "was already waited for, or dropped": {
        "Start it again and wait for it once":
            "tests/ranks/test_sp_attention.py::"
            "test_misuse_is_told_and_lost_exchanges_do_not_pile_up",
    },
    "rows or columns for {heads} heads": {
        "give it {heads * depth}":
            "tests/ranks/test_sp_parts.py::test_loss_every_gradient_and_a_step_equal_one_process",
    },
    "Cannot split {total} items": {"give a size of 1 or more": SHARES},
    "must serve equally many query heads": {
        "Choose kv_heads among the divisors of heads":
            LAYOUT + "test_a_plan_gives_every_query_head_once_with_the_key_value_head_it_reads",
    },
    "of which it is not known what it is where": {"make the mesh with sequence = 1": WHOLE},
    "the eager attention of {type(module)": {
        "choose another attn_implementation when the model is made, such as 'sdpa'": HF_RIGHT
    },
    "the eager attention of {kind}": {"choose another implementation": HF_RIGHT},
    "the model makes an attention mask of its own": {
        "give it a mask [B, 1, S, S]": OTHER_WAYS, "make the mesh with sequence = 1": WHOLE,
    },
    "with a mask that was not made by": {"make the mesh with sequence = 1": WHOLE},
    "whose masks are not cut": {"choose 'sdpa'": HF_RIGHT},  # the other one needs a device
    "with reorder_and_upcast_attn computes": {"set it to False": HF_RIGHT},
    "this rank's part of its output is not known": {
        "give parallelize() the model itself": HF_RIGHT
    },
    "of which it is not known how it is cut": {
        "leave it out": HF_RIGHT, "make the mesh with sequence = 1": WHOLE,
    },
    "since parallelize(), which would attend": {
        "choose attn_implementation before parallelize()": HF_RIGHT
    },
    "of the sequence group and the batch has": {
        "make it of this batch, with rank = mesh.sequence_rank and size = mesh.sequence":
            "tests/ranks/test_hf_ring.py::"
            "test_what_a_user_computes_from_this_ranks_logits_belongs_to_the_layouts_positions",
    },
    "the model's loss function is": {
        "compute the loss from the logits": OWN_LOSS, "make the mesh with sequence = 1": WHOLE,
    },
    "computed its loss past its loss_function": {
        "leave out labels and compute the loss from the logits": OWN_LOSS,
        "make the mesh with sequence = 1": WHOLE,
    },
    "where it is given none": {
        "give it position_ids where sequences are cut":
            HF + "test_a_model_that_makes_positions_of_its_tokens_takes_those_that_it_is_given",
    },
    "for what a ring of {ring.group.size} does not compute": {
        "choose attn_implementation = 'sdpa' or 'eager'":
            "tests/ranks/test_hf_ring.py::"
            "test_losses_gradients_and_steps_are_those_of_one_process",
        "make the mesh with ring = 1": HF_RIGHT,
    },
    "flash-attn is not installed": NOT_RUN,
    "No attention kernel {name}": {"choose one of": FORMULA},
    "was asked for, but {unsupported}": {"Choose 'auto' or 'sdpa'": FORMULA},
    "Give labels or ignored ranges, not both": {
        "Give labels": LAYOUT + "test_given_labels_are_cut_as_they_are", "ignored ranges": SHARES,
    },
    "Ignored ranges of row {row} must rise": {"rise within 0 and {length}": SHARES},
    "No head output {output}": {"choose one of": LOSSES},
    "A chunk of {chunk_tokens} tokens is empty": {"give 1 or more": LOSSES},
    "No form {form} of attention over ranges": {
        "choose one of": RANGES + "test_blocks_arrive_before_they_are_used_and_messages_meet"
    },
    "of the sequence group was given {what} than rank 0": {
        "give every rank of a sequence group the same whole batch":
            "tests/ranks/test_same_batch.py::"
            "test_another_batch_on_one_rank_is_refused_on_all_and_the_next_one_is_right",
        "draw other data by mesh.data_rank": HF_RIGHT,
    },
}  # fmt: skip

PIPE = (
    "tests/ranks/test_pipeline_parity.py::"
    "test_loss_every_gradient_and_every_message_are_as_they_should_be"
)
TENSOR = (
    "tests/ranks/test_tensor_parallel.py::"
    "test_gradients_norm_and_steps_of_layers_cut_twice_are_one_processs"
)
EVALUATED = "tests/ranks/test_pipeline_train.py::test_steps_and_evaluations_equal_one_process"
ALL_BLOCKS = (
    "tests/ranks/test_pipeline_refused.py::test_a_pattern_of_all_blocks_changes_nothing"
)
EQUALIZED = (
    "tests/ranks/test_pipeline_tied.py::"
    "test_copies_that_were_written_or_stepped_apart_are_refused_and_made_equal"
)
SHAPES = (
    "tests/ranks/test_pipeline_dtypes.py::"
    "test_micro_batches_of_another_number_or_shape_are_refused_before_anything_runs"
)
TIED = "tests/ranks/test_pipeline_tied.py::"
TIED_RIGHT = TIED + "test_gradients_norm_and_steps_are_one_processs_under_every_schedule"
BOTH_GRADIENTS = (
    "tests/ranks/test_pipeline_frozen.py::"
    "test_such_weights_are_right_where_one_backward_computes_both_gradients"
)
LOST_LOSS = (
    "tests/ranks/test_pipeline_refused.py::test_a_loss_without_a_graph_is_refused_by_name"
)
PIPELINE: Table = {
    "blocks cannot be split into {stages} chunks": {
        "choose fewer stages or chunks": PIPE, "or more layers": PIPE,
    },
    "a pipeline splits a model with": {
        "Give it these, as the zoo's models do": PIPE,
        "or make the stages yourself": TIED + "test_stages_of_ones_own_say_what_is_tied",
    },
    "leaves out some of layers.0": {"leave it empty": PIPE, 'or set "layers.*"': ALL_BLOCKS},
    "tensor ranks is not supported": {
        "make the mesh with tensor = 1": PIPE, "or pipeline = 1": TENSOR,
    },
    "equalize() of a pipeline was called": {"call it between two steps": EQUALIZED},
    "step() or evaluate() of a pipeline was called": {"call it between steps": EVALUATED},
    "copies of tied weights are not equal": {
        "Write, freeze and step all of them alike": TIED_RIGHT,
        "Pipeline.equalize() copies the first stage's values": EQUALIZED,
    },
    "but they are disabled here": {"use evaluate()": EVALUATED},
    "a loss is one number, but the criterion gave": {
        "give labels": PIPE,
        "or a criterion that sums":
            TIED + "test_stages_of_ones_own_say_what_is_tied",
    },
    "a criterion returns a loss, a tensor of one element": {
        "return the tensor from which backward begins": LOST_LOSS,
    },
    "the criterion gave a loss without a graph": {
        "compute it from the last chunk's output without detach()": LOST_LOSS,
        "for a micro-batch that does not count return output.sum() * 0":
            "tests/ranks/test_pipeline_refused.py::"
            "test_a_micro_batch_that_does_not_count_gives_its_output_times_zero",
    },
    "matches none of layers.0": {"leave blocks empty": PIPE, 'or set "layers.*"': ALL_BLOCKS},
    "stages exchange hidden states of one shape": {
        "pad the batch": SHAPES, "or make another Pipeline": PIPE,
    },
    "pipeline.schedule {name}": {"choose one of": PIPE},
    "give Pipeline.create the right shape": {
        "give Pipeline.create the right shape": SHAPES,
        "and every micro-batch the same one": SHAPES,
    },
    "the width of hidden states is not known": {"give Pipeline.create the shape": SHAPES},
    "stage {stage_index} does not say what it takes and returns": {
        "give ISPPipelineStage input_args and output_args":
            "tests/ranks/test_pipeline_tied.py::test_stages_of_ones_own_say_what_is_tied",
    },
    "cannot compute weight gradients separately": {
        "Take a schedule with a full backward (1F1B, Interleaved1F1B)": BOTH_GRADIENTS,
        "or recompute a block of each chunk (activation_checkpoint)": BOTH_GRADIENTS,
    },
    "has a ZeroOptimizer for a chunk with tied weights": {
        "make the Pipeline first, which finds tied weights, then the optimizers":
            TIED + "test_a_zero_optimizer_steps_and_clips_as_one_process",
    },
    "pipeline ranks tie different weights": {"make the same model on every rank": TIED_RIGHT},
    "copies of one weight must be sharded alike": {
        "Name all of them where a rule of the plan names one":
            TIED + "test_a_tied_weight_of_any_mesh_is_one_weight",
        "or untie them": PIPE,
    },
}  # fmt: skip
RESTARTED = (
    "tests/ranks/test_elastic.py::"
    "test_a_run_goes_on_by_itself_after_a_rank_died_and_ends_with_the_same_bytes"
)
FAILURE: Table = {
    "and with it the causes that other ranks had": {
        "see its log": "tests/ranks/test_last_words.py::test_a_process_that_ends_leaves_its_cause"
    },
    "If it was only done before this rank": {
        "see its log": "tests/ranks/test_last_words.py::test_a_process_that_ends_leaves_its_cause",
        "torch.distributed.barrier() as the last call":
            "tests/ranks/test_last_words.py::"
            "test_a_read_after_the_end_of_the_stores_process_says_so_unless_ranks_end_together",
    },
    "cannot go on: {fatal}. Restart": {"Restart the job": RESTARTED},
    "because the ranks are at different points": {"Restart the job from a checkpoint": RESTARTED},
    "wait timeout": NO_ADVICE,
}  # fmt: skip
DEVICE_MESH = (
    "tests/ranks/test_device_mesh.py::test_loss_and_gradients_on_a_users_mesh_are_one_processs"
)
PROGRAMS = (
    "tests/ranks/test_documents.py::"
    "test_the_programs_of_a_loop_of_ones_own_make_its_mesh_and_unfreeze_a_head"
)
RINGS = "tests/ranks/test_sp_ring.py::test_every_form_equals_one_process"
EXPERTS = "tests/ranks/test_experts.py::test_gradients_norms_and_steps_equal_one_process"


def degrees(world: int, **sizes: Any) -> Remedy:
    """A mesh that can be."""
    return partial(MeshShape, world, **sizes)  # type: ignore[return-value]


BESIDE = (
    "tests/ranks/test_fsdp_experts.py::"
    "test_experts_on_a_mesh_of_their_own_have_the_numbers_of_fsdp2"
)
MESH: Table = {
    "as meshes of experts are": {
        "make the former of every n-th of the latter": BESIDE, "or of neighbors among them": BESIDE,
    },
    "have no names: give": {"give init_device_mesh its mesh_dim_names": DEVICE_MESH},
    "give the one of all ranks, of which it may": {
        "give the one of all ranks": DEVICE_MESH, "and name all of its axes": DEVICE_MESH,
    },
    "which cross: one of the two must": {
        "Shard weights over both": DEVICE_MESH, "or sequences": DEVICE_MESH,
    },
    "is left without a meaning": {"name it in": DEVICE_MESH},
    "along one axis weights are sharded, or": {"or replicated": DEVICE_MESH},
    "cannot be used any more: close": {
        "close it after its last use":
            "tests/ranks/test_mesh_close.py::"
            "test_each_rank_closes_when_it_has_done_and_what_is_in_flight_arrives",
        "or make a new mesh and call parallelize() on a model for it":
            "tests/ranks/test_mesh_close.py::"
            "test_what_needs_a_closed_mesh_is_refused_by_name_and_parameters_keep_their_shards",
    },
    "no process group: start": {
        "start the program with torchrun": PROGRAMS,
        "`internsp train`": "tests/ranks/test_tutorial.py::"
            "test_a_page_of_the_tutorial_does_what_it_says",
        "or call torch.distributed.init_process_group first": DEVICE_MESH,
    },
    "sends tensors of {device} from rank to rank": {
        "leave out init_process_group": PROGRAMS, "or make the mesh with device_type": RINGS,
    },
    "the clocks of collectives overflow": NO_ADVICE,
    "device on this machine; use 'cpu'": {"use 'cpu'": FORMS},
    "ranks ask for different meshes": {"start every rank with the same configuration": FORMS},
    "this mesh has no tensor ranks": {"give ParallelMesh.create(tensor=...)": TENSOR},
    "this rank could not meet the others": {"start all ranks with one launcher": PROGRAMS},
    "near = {near}: choose": {"choose which ranks are neighbors, one of": RINGS},
    "that share heads and {list(ring)} of a ring": {"attach those of one mesh": RINGS},
    "but attention is split over {self}": {
        "make it with ring = mesh.ring and near = mesh.near": RINGS,
    },
    "near={self.near} names no axis": {"choose one of {NEAR}": degrees(4, sequence=4, near="ring")},
    "near_experts={self.near_experts} is no axis": {
        "choose one of {both}": degrees(4, expert=2, expert_weight=2, near_experts="expert"),
    },
    "group do not ascend": {
        "make the DeviceMesh of ranks that ascend": DEVICE_MESH, "put the axes": DEVICE_MESH,
    },
}  # fmt: skip
BALANCED = "tests/ranks/test_mixture_layer.py::"
BALANCED += "test_gradients_losses_and_balance_are_those_of_one_process"
CAPACITY = "tests/unit/test_router.py::test_first_choices_and_early_tokens_have_a_place"
LAYERS: Table = {
    "dropout of {tuple(x.shape)} needs": {
        "see internsp.layers.dropout":
            "tests/unit/test_dropout.py::"
            "test_a_part_of_the_positions_has_its_part_of_the_mask",
    },
    "experts: choose 1 to": {"choose 1 to": BALANCED},
    "score = {router.score}": {"give softmax or sigmoid": BALANCED},
    "{name} = {size}": {"give a whole number of at least": BALANCED},
    "{name} = {getattr(router, name)}": {"give a number of at least 0": BALANCED},
    "so many times its equal share": {"choose 1.25": CAPACITY, "or 0 to drop nothing": CAPACITY},
    "experts of {top_groups} groups": {"choose more groups, or fewer experts": BALANCED},
    "were never added to a loss": {"add internsp.router_loss(model)": BALANCED},
    "norm = 'apex' was asked for": {
        "choose norm = 'torch' or 'auto'":
            "tests/unit/test_layers_small.py::test_auto_takes_torch_without_apex_and_says_so",
    },
}
HANDLES: Table = {
    "the module that owned it was deleted": {
        "Keep the model alive until backward has returned": FORMS
    },
}
OWNED = "tests/ranks/test_owners.py::test_every_family_computes_what_one_process_does"
REFUSED = (
    "tests/ranks/test_owners_state.py::"
    "test_what_owners_cannot_have_is_named_on_every_rank_and_the_model_is_as_before"
)
GATHERED = "tests/ranks/test_experts_state.py::"
GATHERED += "test_owners_that_a_model_does_not_declare_are_refused_on_all_ranks"
STAGED = "tests/ranks/test_owners_pipeline.py::test_losses_of_routers_train_on_every_stage"
EXPERTS: Table = {
    "owners do not divide": {
        "make the mesh with expert = a divisor of it": REFUSED,
        "or shard all experts over expert_weight": GATHERED,
    },
    "already is expert parallel by transformers": {
        "load the model without its distributed_config": OWNED, "or make the mesh with expert = 1":
        GATHERED,
    },
    "does not count it among the experts": {"add its name there": OWNED},
    "lies among {number} experts": {
        "give it a rule (weight_parallel.rules) with axis = \"dense\"": REFUSED,
        "or make the mesh with expert = 1": GATHERED,
    },
    "choose experts_implementation": {"choose experts_implementation before parallelize()": OWNED},
    "no stage of a pipeline but the last could add": {
        "give Pipeline.create a router_scale": STAGED, "or balance by balance_rate": BALANCED,
    },
    "dropped after an exception. Run the": {"Run the model's forward again": OWNED},
}
LLAMA = (
    "tests/unit/test_zoo.py::"
    "test_llama_equals_a_plain_implementation_in_logits_loss_and_every_gradient"
)
FAMILIES = "tests/unit/test_zoo.py::test_families_with_experts_equal_a_plain_implementation"
ZOO: Table = {
    "of latent attention has its own key": {"leave it out": FAMILIES},
    "features a head: choose an even number, 2 to": {"choose an even number, 2 to": FAMILIES},
    "is not a multiple of model.heads": {
        "change one of them": LLAMA, "or set model.head_dim": LLAMA,
    },
    "a model with dropout needs to know": {
        "SequenceLayout.create(ids, row_keys=internsp.row_keys(seed, numbers))":
            "tests/unit/test_dropout.py::"
            "test_a_model_drops_in_training_alone_by_the_rows_that_it_is_told",
        "or model.eval()":
            "tests/unit/test_dropout.py::"
            "test_a_model_drops_in_training_alone_by_the_rows_that_it_is_told",
    },
    "is on the meta device; give": {
        "give it memory before its values":
            "tests/unit/test_zoo_build.py::"
            "test_a_model_built_on_meta_and_materialized_equals_one_built_at_once",
    },
    "but the sequence layout is of": {"pass layout.input_ids, this rank's part": FORMS},
}  # fmt: skip
NAMED = "tests/unit/test_names.py::test_patterns_mean_what_trying_every_way_means"
NAMES: Table = {
    "has a [: write": {"write {a-b} for numbers from a to b": NAMED},
    "write the smaller number first": {"write the smaller number first": NAMED},
}
PROGRAMS = "tests/ranks/test_fsdp_programs.py::"
OWNED = "tests/ranks/test_fsdp_experts.py::"
WRITTEN = "tests/ranks/test_fsdp_errors.py::test_what_a_refusal_says_to_write_works"
OWN = "tests/ranks/test_own_communicator.py::"
ZERO = "tests/ranks/test_fsdp_zero.py::test_steps_are_those_of_fsdp2_with_half_of_the_state"
FSDP: Table = {
    "give several optimizers before their first steps": {
        "give several optimizers before their first steps":
            "tests/ranks/test_fsdp_zero.py::"
            "test_muon_beside_another_optimizer_steps_as_one_process_on_any_mesh",
    },
    "which a model of zero_optimizer has not": {
        "call setters of synchronization on the whole model": ZERO,
        "and leave the others out": ZERO,
    },
    "the mesh has no replicas": {
        "leave it out": WRITTEN, "or give fully_shard a mesh of two dimensions": ZERO,
    },
    "are sharded over the ranks of": {
        "give every fully_shard of one model the same mesh": WRITTEN,
        "or one beside it for all experts": f"{OWNED}test_other_meshes_are_refused_by_name",
    },
    "sums of gradients are divided by several numbers": {
        "call set_gradient_divide_factor with the same number on every module":
            f"{OWNED}test_an_optimizer_over_the_replicas_steps_experts_too",
    },
    "was sharded by torch's": {
        "call internsp.fsdp's": WRITTEN, "or internsp.fsdp.install() before": WRITTEN,
    },
    "needs a mesh of all ranks": {
        "leave it out": "tests/ranks/test_fsdp_programs.py::"
        "test_a_mesh_of_some_ranks_has_the_numbers_of_fsdp2",
        "and write internsp.fsdp.options(model, near_ranks":
            "tests/ranks/test_near.py::"
            "test_loss_and_every_gradient_equal_one_process",
    },
    "options: call it before": {"call it before the first forward": WRITTEN},
    "communicator=yours": {
        "write internsp.parallelize(..., communicator=yours)":
            f"{OWN}test_the_communicator_of_the_document_trains_as_one_process",
    },
    "slots are allocated once": {"leave it out": WRITTEN},
    "has no plan": {
        "call internsp.fsdp.fully_shard on it": WRITTEN, "and run a forward": WRITTEN,
    },
    "is shared with a module that another call": {
        "use fully_shard([module_a, module_b])": f"{PROGRAMS}test_parts_of_a_model_run_alone"
    },
    "has got fsdp_pre_all_gather since its gather": {
        "put the functions on its local tensor before":
            "tests/ranks/test_fsdp_extensions.py::"
            "test_functions_of_an_instance_are_called_as_by_fsdp2",
    },
    "in which nothing is summed": {"give it to fully_shard(ignored_params={...})": WRITTEN},
    "which fully_shard() would lose": {
        "call register_post_accumulate_grad_hook after it":
            f"{PROGRAMS}test_methods_of_an_fsdp_module_do_what_torchs_do",
    },
    "was added after fully_shard(), so that no rank would share": {
        "build the whole model first, adapters included":
            "tests/ranks/test_dtypes.py::"
            "test_fp32_adapters_train_over_a_frozen_bf16_base_as_on_one_process",
    },
}  # fmt: skip
TABLES = {
    "fsdp": FSDP, "sp": SP, "pipeline": PIPELINE, "failure": FAILURE, "mesh": MESH,
    "layers": LAYERS, "model_zoo": ZOO, "base/names.py": NAMES, "errors": {}, "experts": EXPERTS,
    "base/handles.py": HANDLES,
}  # fmt: skip


def test_every_room_has_a_table() -> None:
    """Those of rooms below the application that train models, and of the application, elsewhere."""
    paths = [*TABLES, *test_app_remedies.TABLES, *test_model_remedies.TABLES]
    paths += [*test_remedies.ROOMS, *test_optim_remedies.ROOMS]
    rooms = {path.removesuffix(f"/{Path(path).name}") if path.endswith(".py") else path
             for path in paths}  # fmt: skip
    assert {room.replace("/", ".") for room in rooms} == {r for floor in FLOORS for r in floor}


@pytest.mark.parametrize("room", TABLES)
def test_what_errors_say_to_do_is_in_the_table(room: str) -> None:
    require_complete([room], TABLES[room])


@pytest.mark.parametrize("room", TABLES)
def test_a_remedy_that_an_error_names_works(room: str) -> None:
    run(TABLES[room])
