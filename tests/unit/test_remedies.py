"""What errors of the rooms below say to do is run by the tests that these tables name.

A row has a piece of a text, and for each remedy in it the words that name it and the test that does
it and compares, or a function here. Rooms that train models have tables in `tests/ranks`.
"""

from __future__ import annotations

import pytest

from tests.support.remedies import NO_ADVICE, NOT_RUN, Table, require_complete, run

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
    "DistributedAttention object was deleted": {
        "Keep the model alive until backward has returned": FORMS
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
    "for what a ring of {self.group.size} does not compute": {
        "choose attn_implementation = 'sdpa' or 'eager'":
            "tests/ranks/test_hf_ring.py::"
            "test_losses_gradients_and_steps_are_those_of_one_process",
        "make the mesh with ring = 1": HF_RIGHT,
    },
    "flash-attn is not installed": NOT_RUN,
    "torch.nn.attention.varlen is missing": NOT_RUN,
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
PIPELINE: Table = {
    "blocks cannot be split into {stages} chunks": {
        "choose fewer stages or chunks": PIPE, "or more layers": PIPE,
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
    "matches none of layers.0": {"leave blocks empty": PIPE, 'or set "layers.*"': ALL_BLOCKS},
    "stages exchange hidden states of one shape": {
        "pad the batch": SHAPES, "or make another Pipeline": PIPE,
    },
    "pipeline.schedule {name}": {"choose one of": PIPE},
    "give Pipeline.create the right shape": {
        "give Pipeline.create the right shape (None: torch finds it out)": SHAPES,
        "and every micro-batch the same one": SHAPES,
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
    "cannot go on: {fatal}. Restart": {"Restart the job": RESTARTED},
    "because the ranks are at different points": {"Restart the job from a checkpoint": RESTARTED},
    "wait timeout": NO_ADVICE,
}  # fmt: skip
TABLES = {"sp": SP, "pipeline": PIPELINE, "failure": FAILURE}


@pytest.mark.parametrize("room", TABLES)
def test_what_errors_say_to_do_is_in_the_table(room: str) -> None:
    require_complete([room], TABLES[room])


@pytest.mark.parametrize("room", TABLES)
def test_a_remedy_that_an_error_names_works(room: str) -> None:
    run(TABLES[room])
