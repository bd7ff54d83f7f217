"""What errors of the rooms below say to do is run by the tests that these tables name.

A row has a piece of a text, and for each remedy in it the words that name it and the test that does
it and compares, or a function here. Rooms that train models have tables in `tests/ranks`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from internsp.app.config import load_config
from internsp.app.config.sections import CheckpointConfig
from tests.support.remedies import Remedy, Table, require_complete, run

NOT_RUN: dict[str, str] = {}  # a package to install, or a device
NO_ADVICE: dict[str, str] = {}  # words that only look like it

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
def never_resumes() -> None:
    """Also where a launcher starts ranks again, under which a run resumes by itself."""
    given = CheckpointConfig(resume="never")
    assert not given.from_own_folder(elastic=True)
    assert given.named is None
    assert CheckpointConfig().from_own_folder(elastic=True)


GOES_ON = "tests/ranks/test_train.py::test_a_resumed_run_goes_on_as_if_it_had_not_stopped"
ANY_MESH = (
    "tests/ranks/test_checkpoint_meshes.py::"
    "test_every_mesh_saves_the_same_bytes_of_what_another_has_saved"
)
EARLIER = (
    "tests/ranks/test_writers.py::"
    "test_tensorboard_has_every_row_once_also_of_steps_that_were_done_again"
)
SKIPPED = (
    "tests/ranks/test_train_not_finite.py::"
    "test_weights_that_are_not_finite_are_neither_saved_nor_resumed_from"
)
LATEST = "tests/unit/test_checkpoint_folder.py::"
CHECKPOINT: Table = {
    'or checkpoint.resume = "never" to start afresh': {
        "give the path of another": GOES_ON, 'checkpoint.resume = "never"': never_resumes,
    },
    "Set them as they were": {
        "Set them as they were": GOES_ON, 'checkpoint.resume = "never"': never_resumes,
    },
    "is not resumed from; give": {"give the path of an earlier checkpoint": EARLIER},
    "but on this machine sequence {here.sequences}": NOT_RUN,  # another version of numpy
    "which this optimizer needs to go on": {
        "resume with its own class": ANY_MESH, 'checkpoint.resume = "never"': never_resumes,
    },
    "has no {name}; resume": {"resume with its own model": GOES_ON},
    "here it is {str(value.dtype)": {"resume with its own model": GOES_ON},
    "form the groups as they were": {
        "form the groups as they were (optimizer.groups)":
            "tests/ranks/test_checkpoint_meshes.py::"
            "test_counts_of_two_groups_go_on_in_groups_as_they_were_and_in_no_other",
    },
    "Weights and optimizer are those of before: look": {
        "lower optimizer.lr": GOES_ON, "or raise train.max_skipped_steps": SKIPPED,
    },
    "which is no checkpoint beside it: give": {
        "give {latest.parent}":
            LATEST + "test_a_latest_that_names_no_checkpoint_beside_it_is_refused_by_name_and_"
            "passed_over",
        "or one step-* in it": EARLIER,
    },
    "checkpoint.peer = true needs Linux": {"set it to false": GOES_ON},
    "checkpoint.peer = true keeps copies": {
        "start with torchrun --max-restarts":
            "tests/ranks/test_peer.py::"
            "test_torchrun_goes_on_from_memory_with_the_same_bytes_and_leaves_nothing",
        "or set it to false": GOES_ON,
    },
    "start() has prepared": NO_ADVICE,
}  # fmt: skip
def accepted(world: int = 1, **sections: Any) -> Remedy:
    """A configuration that is taken as it is."""
    return partial(load_config, sections, world_size=world)  # type: ignore[return-value]


JSONL = {"source": "jsonl", "paths": ["."]}
TABLE_OF = {"evaluation": [{"name": "a", **JSONL}]}
TWO_STAGES = {"pipeline": 2}
IN_FOLDERS = "tests/unit/test_config_hf.py::"
CHATS = (
    "tests/unit/test_chat.py::"
    "test_a_chat_is_what_its_template_says_and_the_assistants_words_count"
)
APP_CONFIG: Table = {
    'is not supported with model.family = "hf"; use': {
        "use 1": IN_FOLDERS + "test_other_names_of_sizes_are_read",
    },
    'unused with {prefix}source = "stdlib"': {
        'set {prefix}source to "text", "jsonl" or': accepted(data={**JSONL, "source": "text"}),
    },
    "set it above 0, or leave the tables out": {
        "set it above 0": accepted(data=TABLE_OF, train={"eval_batches": 1}),
        "or leave the tables out": accepted(train={"eval_batches": 0}),
    },
    "there are not two texts to average": {
        "give tables [[data.evaluation]]": accepted(data=TABLE_OF, train={"eval_average": True}),
    },
    "uses the held-out loss, and there is none": {
        "set data.held_out": accepted(
            data={"held_out": 0.1}, train={"early_stop": 2, "eval_every": 1}
        ),
        "or eval_average": accepted(
            data={"evaluation": [{"name": n, **JSONL} for n in "ab"], "held_out": 0},
            train={"early_stop": 2, "eval_every": 1, "eval_average": True},
        ),
    },
    "float16 has no range for scales": {
        f"{verb} {dtype}": accepted(
            train={"dtype": dtype}, weight_parallel={"quantize": "fp8"}
        ) for verb, dtype in (("use", "bfloat16"), ("or", "float32"))
    },
    "divides by all valid tokens itself": {
        'use "sum"': accepted(weight_parallel={"reduction": "sum"}),
    },
    "for loops without a ZeroOptimizer, which internsp train has; leave": {
        "leave it out": accepted(),
    },
    "do not fit": {
        "use a multiple of": accepted(
            2, parallel=TWO_STAGES, train={"micro_batches": 6, "global_batch": 6},
            pipeline={"schedule": "Interleaved1F1B", "chunks": 2},
        ),
    },
    'unused with schedule = "{optimizer.schedule}"': {
        'set it to "wsd"': accepted(optimizer={"schedule": "wsd", "decay_steps": 3}),
    },
    "steps all parameters: set": {
        'optimizer.rest = "adamw", or': accepted(
            optimizer={"name": "adafactor", "rest": "adamw", "rest_lr": 1e-3}
        ),
        "optimizer.lr": accepted(optimizer={"lr": 1e-3}),
    },
    "needs the steps: set": {
        "set train.torch_profile": accepted(
            train={"memory_snapshot": True, "torch_profile": [1, 2]}
        ),
    },
    "too long for the name of a folder": {"use at most 200": accepted(train={"name": "x" * 200})},
    "{hf_folder.FILE} has no {names}": {
        "set model.{key}": IN_FOLDERS + "test_a_size_that_config_json_lacks_may_be_given",
    },
    "{hf_folder.FILE} of model.path says": {
        "leave it out":
            IN_FOLDERS + "test_sizes_are_those_of_config_json_and_survive_the_resolved_file",
    },
    '"{given.format}" needs rows': {'set {prefix}source to "jsonl" or "parquet"': CHATS},
    '"{given.format}" needs the chat template': {
        "set data.tokenizer": CHATS, "to a folder that transformers reads": CHATS,
    },
    "is the name of another figure; choose": {
        "choose one": accepted(data=TABLE_OF),
    },
    "another is called {part.called}, too: give": {
        "give it a name": accepted(
            data={"mixture": [{"name": n, "weight": 1.0, **JSONL} for n in "ab"]}
        ),
    },
    "chunks without a pipeline": {
        "set parallel.pipeline above 1": accepted(
            2, parallel=TWO_STAGES, train={"micro_batches": 2, "global_batch": 2},
            pipeline={"schedule": "Interleaved1F1B", "chunks": 2},
        ),
        "or use 1": accepted(pipeline={"chunks": 1}),
    },
    "{name} has no momentum": {
        "set {betas}": accepted(optimizer={"betas": [0.8, 0.9]}),
        'optimizer.name = "sgd"': accepted(optimizer={"name": "sgd", "momentum": 0.9}),
    },
    "{name} has none": {"leave it out": accepted(optimizer={"name": "sgd"})},
    "a step would take more from every weight": {
        "lower one of them": accepted(optimizer={"lr": 1.0, "weight_decay": 0.9}),
    },
    "whole matrices; leave": {"leave it out": accepted(optimizer={"name": "muon"})},
    "group {number}: {group.optimizer} is neither": {
        "give {both}": accepted(
            optimizer={"name": "muon", "groups": [{"match": "head", "optimizer": "adamw"}]}
        ),
    },
    "set optimizer.rest, too": {
        "set optimizer.rest, too": accepted(optimizer={
            "name": "adafactor", "rest": "adamw",
            "groups": [{"match": "head", "optimizer": "adamw"}],
        }),
    },
    'unused without "wandb" in report.writers': {
        "add it": accepted(report={"writers": ["wandb"], "wandb_project": "p"}),
        "or leave this out": accepted(),
    },
    "{text}; change one": {
        "change one": accepted(model={"heads": 4, "hidden_size": 64}),
        "or give model.head_dim": accepted(
            model={"heads": 3, "hidden_size": 64, "head_dim": 16, "kv_heads": 3}
        ),
    },
    "unused with data.mixture": {
        "leave it out": accepted(data={"mixture": [{"weight": 1.0, **JSONL}]}),
    },
    "is a section: write": {
        "write [{written}] and its keys below": accepted(train={"steps": 3}),
    },
    "or a class as": {
        "give {', '.join(OPTIMIZERS)}": accepted(optimizer={"name": "sgd"}),
        'or a class as "package.module:Class"': accepted(optimizer={"name": "torch.optim:SGD"}),
    },
    "write an argument as": {
        'write an argument as "name = value", a text in quotes': accepted(
            optimizer={"name": "torch.optim:SGD", "options": ["momentum = 0.9", 'foreach = "a"']}
        ),
    },
    "parameters take {held / 2 ** 40} TiB": {
        "check hidden_size, layers, heads, head_dim, intermediate_size": accepted(),
        "or raise parallel.weight": accepted(
            1024, model={"layers": 1 << 11, "hidden_size": 1 << 16, "heads": 512},
            parallel={"weight": 1024}, train={"global_batch": 1024},
        ),
    },
    "features take {inputs / 2 ** 40} TiB": {
        "lower it or train.global_batch": accepted(),
        "or raise train.micro_batches or parallel.sequence": accepted(
            model={"hidden_size": 1 << 14, "heads": 128},
            data={"sequence_length": 1 << 20}, train={"global_batch": 2048, "micro_batches": 2048},
        ),
    },
    # lists of names
    "name options rest whole_matrix": NO_ADVICE,
    "seed dtype": NO_ADVICE,
    "name micro_batches eval_every": NO_ADVICE,
    "save every keep_last": NO_ADVICE,
}  # fmt: skip
TABLES = {
    "sp": SP, "pipeline": PIPELINE, "failure": FAILURE, "app/checkpoint": CHECKPOINT,
    "app/config": APP_CONFIG,
}  # fmt: skip


@pytest.mark.parametrize("room", TABLES)
def test_what_errors_say_to_do_is_in_the_table(room: str) -> None:
    require_complete([room], TABLES[room])


@pytest.mark.parametrize("room", TABLES)
def test_a_remedy_that_an_error_names_works(room: str) -> None:
    run(TABLES[room])
