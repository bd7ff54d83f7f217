"""What errors of the application say to do is done by what these tables name: test_remedies.py."""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from internsp.app.config import load_config
from internsp.app.config.sections import CheckpointConfig, DataConfig
from internsp.app.data.batches import DataSource
from internsp.app.plan.devices import device_named, on_device
from internsp.app.plan.search import search
from internsp.errors import ConfigError
from tests.support.batches import train_batch
from tests.support.remedies import (
    NO_ADVICE,
    NOT_RUN,
    Remedy,
    Table,
    require_complete,
    run,
)


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
SKIPPED = (
    "tests/ranks/test_train_not_finite.py::"
    "test_weights_that_are_not_finite_are_not_saved"
)
CHECKPOINT: Table = {
    "rank 0 does not see {min(missing)} in {folder}": {
        "give all ranks one folder that they share (--output)": GOES_ON,
    },
    "cannot compute here: {reason}; give another": {
        "give another, as cpu":
            "tests/ranks/test_generate.py::test_one_process_continues_what_any_mesh_has_saved",
    },
    "is not UTF-8: give the text as UTF-8": {
        "give the text as UTF-8":
            "tests/ranks/test_generate.py::test_one_process_continues_what_any_mesh_has_saved",
    },
    "transformers has no family that computes what": {
        "use the run itself (internsp generate)":
            "tests/ranks/test_generate.py::test_one_process_continues_what_any_mesh_has_saved",
        'or train a folder of transformers (model.family = "hf")':
            "tests/ranks/test_export.py::"
            "test_a_model_of_transformers_comes_back_with_the_logits_that_it_was_trained_to",
    },
    "no complete checkpoint at {path}": {"give the path of another": GOES_ON},
    "Set them as they were": {
        "Set them as they were": GOES_ON, 'checkpoint.resume = "never"': never_resumes,
    },
    "so that the order of the data would not continue": {
        "give it that text": GOES_ON,
        "or begin a run with its weights (internsp export, then model.path)":
            "tests/ranks/test_from_folder.py::"
            "test_a_folder_becomes_the_zoos_model_with_the_same_logits_and_first_step",
    },
    "but on this machine sequence {here.sequences}": NOT_RUN,  # another version of numpy
    "which this optimizer needs to go on": {
        "resume with its own class": ANY_MESH, 'checkpoint.resume = "never"': never_resumes,
    },
    "has no {name}; resume": {"resume with its own model": GOES_ON},
    "here it is {str(value.dtype)": {"resume with its own model": GOES_ON},
    "which this model does not have": {"resume with its own model": GOES_ON},
    "form the groups as they were": {
        "form the groups as they were (optimizer.groups)":
            "tests/ranks/test_checkpoint_meshes.py::"
            "test_counts_of_two_groups_go_on_in_groups_as_they_were_and_in_no_other",
    },
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
    "blocks has experts": {
        "lower it": accepted(model={"family": "deepseek", "layers": 2, "dense_layers": 1}),
        "or take family llama": accepted(model={"family": "llama", "layers": 2}),
    },
    "take all tokens of a block at once": {
        "use 1": accepted(model={"family": "deepseek"}, activation_checkpoint={"tiles": 1}),
    },
    "every head of latent attention has its own key": {
        "leave it out": accepted(model={"family": "deepseek"}),
    },
    "features a head: choose an even number": {
        "choose an even number up to": accepted(
            model={"family": "deepseek", "hidden_size": 64, "heads": 4, "rotary_size": 8}
        ),
    },
    'is not supported with model.family = "hf"; use': {
        "use 1": IN_FOLDERS + "test_other_names_of_sizes_are_read",
    },
    'unused with {prefix}source = "stdlib"': {
        'set {prefix}source to "text", "jsonl", ': accepted(data={**JSONL, "source": "text"}),
    },
    "set it above 0, or leave the tables out": {
        "set it above 0": accepted(data=TABLE_OF, train={"eval_batches": 1}),
        "or leave the tables out": accepted(train={"eval_batches": 0}),
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
    "{hf_folder.FILE} has no {names}": {
        "set model.{key}": IN_FOLDERS + "test_a_size_that_config_json_lacks_may_be_given",
    },
    "{hf_folder.FILE} of model.path says": {
        "leave it out":
            IN_FOLDERS + "test_sizes_are_those_of_config_json_and_survive_the_resolved_file",
    },
    '"{given.format}" needs rows': {'set {prefix}source to "jsonl", "parquet" or': CHATS},
    '"{given.format}" needs the chat template': {
        "set data.tokenizer": CHATS, "to a folder that transformers reads": CHATS,
    },
    "is the name of another figure; choose": {
        "choose one": accepted(data=TABLE_OF),
    },
    "another is called {name}, too: give": {
        "give it a name of its own": accepted(
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
    "group {number}: {group.optimizer} is neither": {
        "give {both}": accepted(
            optimizer={"name": "muon", "groups": [{"match": "head", "optimizer": "adamw"}]}
        ),
    },
    "set optimizer.other, too": {
        "set optimizer.other, too": accepted(optimizer={
            "name": "adafactor", "other": "adamw",
            "groups": [{"match": "head", "optimizer": "adamw"}],
        }),
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
    # lists of names
    "name options other": NO_ADVICE,
    "seed dtype": NO_ADVICE,
    "name micro_batches eval_every": NO_ADVICE,
    "save every keep_last": NO_ADVICE,
}  # fmt: skip


def data(text: str, **settings: Any) -> Remedy:
    """A source of texts that gives rows."""

    def made() -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "t.txt").write_bytes(os.fsencode(text))
            given = DataConfig(source="text", paths=(folder,), sequence_length=8, **settings)
            assert train_batch(DataSource(given, global_batch=1), 0).ids.numel() > 1

    return made


TOKENS = (
    "tests/ranks/test_batch_tokens.py::"
    "test_a_step_takes_rows_in_their_order_until_they_have_the_tokens"
)
ON_DISK = "tests/unit/test_tokens.py::"
ROWS = "tests/unit/test_rows.py::"
DATA: Table = {
    ", raise data.held_out": {
        "raise data.held_out": data("two words " * 9, held_out=0.5),
        "(0: no evaluation)": data("two words " * 9, held_out=0.0),
    },
    "a sequence takes {least} but the {what}": {
        "give more text": data("two words " * 20, held_out=0.5),
    },
    ", set it lower": {"set it lower": data("two words", held_out=0.0)},
    "sequences have {found} tokens that the loss": {
        "lower it": TOKENS, "or raise data.sequence_length": TOKENS,
    },
    "needs the chat template of a tokenizer": {
        "give a folder that transformers reads, with chat_template.jinja": CHATS,
    },
    "so that its tokens are not known": {
        "mark them in the template by {% generation %} and {% endgeneration %}": CHATS,
    },
    ", or leave its table out": {"or leave its table out": data("two words " * 99)},
    "which rank 0 has made or found, cannot": {
        "give a folder that all ranks see":
            ON_DISK + "test_several_that_make_the_same_tokens_at_once_all_read_them",
    },
    "has tokens from {given.min()}": {
        "give the tokenizer that made the tokens":
            ON_DISK + "test_a_users_own_pair_is_read_where_it_lies",
    },
    "data.paths: {reason}; give a .bin file": {
        "give a .bin file with its .idx":
            ON_DISK + "test_a_users_own_pair_is_read_where_it_lies",
    },
    "is not UTF-8, which": {
        "save that text as UTF-8":
            "tests/unit/test_data.py::"
            "test_a_tokenizers_file_gives_ids_and_text_and_the_end_of_a_document",
        "or leave data.tokenizer out, which trains on bytes": data("caf\udce9 " * 9, held_out=0.0),
    },
    "has splits {sorted(saved)}": {
        "name one, as {first}":
            ROWS + "test_rows_of_a_saved_dataset_are_documents_and_a_mistake_in_it_names_the_row",
    },
    "needs the package {name}": NOT_RUN,
    "the tokens of {path} cannot be written": {
        "give another folder by data.cache_dir":
            ON_DISK + "test_tokens_that_cannot_be_written_say_where_else_and_leave_nothing",
    },
}  # fmt: skip
HUGGING = (
    "tests/ranks/test_train_hf.py::"
    "test_a_folder_trains_as_on_one_process_and_as_its_documents_one_by_one"
)
MODELS: Table = {
    "does not keep packed documents apart": {"set data.pack = false": HUGGING},
    'model.family = "hf" needs transformers': NOT_RUN,
    "{name} in {folder} {text}; set": {'set model.family = "hf"': HUGGING},
}
LONGEST = (
    "tests/unit/test_plan_longest.py::"
    "test_the_longest_sequence_fits_and_one_token_a_rank_more_does_not"
)


def found_by_search(ranks: int = 1, length: int = 32768, layers: int = 24) -> None:
    """Find a layout on devices of 2.5 GiB; one device has none for the step as it is."""
    given = load_config({
        "model": {"hidden_size": 1024, "heads": 8, "layers": layers},
        "data": {"sequence_length": length}, "train": {"global_batch": 8, "dtype": "bfloat16"},
    })  # fmt: skip
    device = replace(device_named("h100-sxm"), memory=2.5 * 2**30)
    assert search(on_device(given, device), ranks, device, rows=1).best


def searched(**changed: int) -> Remedy:
    """A change with which there is a layout, and without which there is none."""

    def made() -> None:
        none_is_found()
        found_by_search(**changed)

    return made


@functools.cache
def none_is_found() -> None:
    with pytest.raises(ConfigError, match="no layout of this step fits on 1 x"):
        found_by_search()


CALIBRATED = "tests/unit/test_plan_calibrate.py::"
MADE_THEM = CALIBRATED + "test_three_runs_give_back_the_constants_that_made_them"
BY_COMMAND = "tests/unit/test_plan_search.py::test_the_command_searches"
PLAN: Table = {
    "write each device as in": {
        "write each device as in {BUILT_IN.name}":
            "tests/unit/test_plan_seconds.py::"
            "test_a_device_of_ones_own_is_read_and_mistakes_in_it_are_told",
    },
    "steps after the first": {"set train.steps to": MADE_THEM},
    "its steps have different numbers of sequences": {"leave out train.batch_tokens": MADE_THEM},
    "four steps of five are within": {
        "run it again with nothing beside it on the machine":
            CALIBRATED + "test_a_slow_step_among_many_and_slow_first_steps_do_not_count",
    },
    "changes the seconds of these runs by": {
        "make a larger model or batch":
            CALIBRATED + "test_a_constant_that_no_run_depends_on_stays_as_it_was",
    },
    "has no peak of": {
        "add it in a file for --device-file":
            "tests/unit/test_plan_seconds.py::"
            "test_a_device_of_ones_own_is_read_and_mistakes_in_it_are_told",
    },
    "was not written by --calibrate": {
        "name another with --write":
            CALIBRATED + "test_the_file_says_what_it_was_made_of_and_is_read",
    },
    "one run fits one constant": {"give runs with other degrees to fit the others": MADE_THEM},
    "devices cannot share {batch} sequences": {
        "plan another number of devices, or change train.global_batch":
            "tests/unit/test_plan_search.py::test_what_cannot_fit_is_said",
    },
    "no layout of this step fits on": {
        "plan more devices": searched(ranks=16),
        "a shorter sequence": searched(length=256),
        "a smaller model": searched(layers=1),
    },
    "{text} is no size": {'write a number and a unit, as "80 GiB"': LONGEST},
    "are too many to plan one by one": {
        "plan fewer micro-batches":
            "tests/unit/test_plan.py::"
            "test_micro_batches_reuse_the_blocks_that_are_still_in_their_slots",
    },
}
AROUND = "tests/unit/test_environment.py::test_a_whole_environment_and_none_at_all_are_right"
PROCESS: Table = {
    "start with torchrun, which sets all": {
        "start with torchrun": AROUND, "or unset them to start local processes": AROUND,
    },
    "torch keeps a history of CUDA's memory": {
        "leave it out": accepted(),
        "or set parallel.device":
            "tests/ranks/test_modes.py::"
            "test_a_snapshot_of_memory_is_of_the_chosen_steps_and_ends_with_them",
    },
}  # fmt: skip
ADVICE = "tests/unit/test_advice.py::"
REPORT: Table = {
    "keep each sequence group on the fastest links": {
        "keep each sequence group on the fastest links":
            ADVICE + "test_exchanges_name_their_block_and_leave_the_link_to_them",
        "or lower parallel.sequence":
            ADVICE + "test_exchanges_name_their_block_and_leave_the_link_to_them",
    },
    "Set weight_parallel.overlap = true": {
        "Set weight_parallel.overlap = true":
            ADVICE + "test_without_overlap_the_first_advice_is_to_turn_it_on",
    },
    "is not a row of metrics": {
        "remove the line": "tests/unit/test_metrics.py::test_a_broken_line_in_the_middle_is_named",
        "or start the run under another name": accepted(train={"name": "another"}),
    },
    "needs a package that is not installed": NOT_RUN,
}  # fmt: skip
OWN = "tests/ranks/test_trainer.py::"
OWN_RIGHT = OWN + "test_own_model_loss_data_and_optimizer_step_as_on_one_process"
NO_EFFECT = OWN + "test_what_a_part_of_ones_own_would_leave_without_effect_is_refused"
ALIKE = (
    "tests/ranks/test_inputs.py::test_ranks_that_are_given_another_configuration_or_text_are_told"
)
SESSION: Table = {
    "{first} on rank 0, {other} on rank {rank}": {
        "start every rank with the same configuration": ALIKE,
    },
    "has read other text than rank 0": {"give every rank the same files": ALIKE},
    "{settings.name} takes none; set": {
        "set it to 0, here and in groups": accepted(
            optimizer={"name": "torch.optim:Rprop", "weight_decay": 0.0}
        ),
    },
    "Trainer: optimizer gives": {
        "return internsp.ZeroOptimizer(communicator, torch.optim.Adam, lr=...)": OWN_RIGHT,
    },
    "data determines its batches": {"set it to 0": NO_EFFECT},
    "a model of your own is not split into stages": {
        "set parallel.pipeline = 1": OWN_RIGHT,
        "or use internsp.Pipeline in a loop of your own":
            "tests/ranks/test_pipeline_tied.py::test_stages_of_ones_own_say_what_is_tied",
    },
    "of your model is on the meta device": {
        "give it values, the same on every rank (torch.manual_seed)": OWN_RIGHT,
    },
    "Trainer: loss is for a model of your own": {"give model, too": OWN_RIGHT},
    "both compute parts of the same sequences": {"choose them by mesh.data_rank": OWN_RIGHT},
    "a model of your own applies its own dropout": {"set it to 0": NO_EFFECT},
    "train.stop_after_tokens: in the first sequences": {
        "raise data.sequence_length":
            "tests/ranks/test_batch_tokens.py::"
            "test_a_run_of_so_many_tokens_ends_with_the_step_that_reaches_them",
    },
}  # fmt: skip
STARTS = "tests/unit/test_preflight.py::test_a_run_that_can_start_leaves_nothing_behind"
DEVICE = "tests/unit/test_preflight.py::test_a_device_that_is_missing_is_told"
LAUNCH: Table = {
    "did not come where the others waited": {
        "raise parallel.timeout_seconds":
            "tests/ranks/test_lookout.py::test_a_rank_that_comes_back_soon_is_waited_for",
    },
    'device on this machine; use "cpu"': {
        'use "cpu" or "auto"': accepted(parallel={"device": "auto"}),
    },
    "{folder}: {error}": {
        "set TMPDIR to a shorter path":
            "tests/ranks/test_ends.py::test_a_folder_whose_name_is_too_long_for_a_socket_is_told",
    },
    "processes need a device each": {
        "start {there}": DEVICE, 'or set parallel.device = "cpu"': STARTS,
    },
}  # fmt: skip
TRAIN: Table = {
    "Weights and optimizer are those of before: look": {
        "lower optimizer.lr": GOES_ON, "or raise train.max_skipped_steps": SKIPPED,
    },
    "replicas of weights are not equal": {
        "and resume from the newest checkpoint": GOES_ON, "look at the machines": GOES_ON,
    },
    "which no run has written": {"choose another train.name or --output": STARTS},
    "is the current folder or above it": {
        "choose another train.name or --output": STARTS, "or resume the run": GOES_ON,
    },
    "rank 0 finds no command": {
        "give its whole path":
            "tests/unit/test_alerts.py::"
            "test_the_message_is_the_last_argument_whatever_is_in_it",
    },
    "is in use by": {
        "wait until it has ended or stop it":
            "tests/unit/test_run_lock.py::test_a_second_run_is_refused_with_the_first_ones_process",
        "or choose another train.name or --output": STARTS,
    },
    "so there is nothing to learn": {
        "raise data.sequence_length or train.global_batch": GOES_ON,
        "or set data.pack = false": HUGGING,
    },
    "a Trainer runs in this process alone": {
        "start the program with torchrun or srun": OWN + "test_a_program_trains",
        "set it to 1": OWN + "test_the_example_of_own_parts_runs",
        "or call internsp.train": OWN + "test_a_program_trains",
    },
    "make another Trainer to go on": {
        "make another Trainer to go on": OWN + "test_a_resumed_rank_has_its_own_buffers_again",
    },
}  # fmt: skip
CLI: Table = {
    "it is for the page of one run": {
        "leave it out":
            "tests/unit/test_report_command.py::"
            "test_runs_side_by_side_have_a_table_and_the_settings_that_differ",
    },
    "give a number from 1 on": {"give a number from 1 on": BY_COMMAND},
    "each has an answer of its own": {"give one": BY_COMMAND},
    "it belongs to": {"give that, too": BY_COMMAND},
    "prints no schedule": {"leave one of them out": BY_COMMAND},
    "to be fitted": {
        "give folders of runs, and --device NAME":
            CALIBRATED + "test_the_file_says_what_it_was_made_of_and_is_read",
    },
    "on which seconds are compared": {"give --device NAME": BY_COMMAND},
    "is out of range": NO_ADVICE,
    "give the folder of a run, or several": {
        "give the folder of a run, or several":
            "tests/unit/test_report_command.py::"
            "test_runs_side_by_side_have_a_table_and_the_settings_that_differ",
    },
    "is there already: name": {
        "name another folder or file":
            "tests/unit/test_wheel.py::"
            "test_init_writes_any_bundled_configuration_and_overwrites_none",
    },
}  # fmt: skip
THEIRS = (
    "tests/ranks/test_transformers_trainer.py::"
    "test_a_run_logs_and_becomes_what_one_process_does"
)
CLIENTS: Table = {
    "has no length, by which an evaluation": {
        "give evaluate() and predict() a data set with a length": THEIRS,
    },
    "do it to the model before parallelize()": {
        "do it to the model before parallelize()":
            "tests/ranks/test_transformers_trainer.py::"
            "test_a_trainer_that_replaces_the_models_forward_trains_as_on_one_process",
    },
    "the launcher gives {args.world_size}": {"start with torchrun": THEIRS},
    "make it with pipeline = 1": {"make it with pipeline = 1": THEIRS},
    "make it with tensor = 1": {"make it with tensor = 1": THEIRS},
    "the loss is divided here, leave": {"leave 'sum'": THEIRS},
    "fp16: use bf16": {
        "compute_dtype = 'bfloat16'":
            "tests/ranks/test_dtypes.py::"
            "test_parameters_whose_rule_says_none_compute_in_it_while_others_are_cast",
    },
    "torch_compile: set compile = True": {
        "set compile = True in WeightParallelConfig":
            "tests/ranks/test_rules_compile.py::"
            "test_compiled_blocks_equal_eager_with_the_same_messages",
    },
    "save_on_each_node: give": {"give all machines one output_dir": THEIRS},
    "model_init: give": {"give the model that parallelize() has cut": THEIRS},
    "only a ZeroOptimizer of this communicator": {"or set optim": THEIRS},
}  # fmt: skip
TABLES = {
    "app/checkpoint": CHECKPOINT, "app/config": APP_CONFIG, "app/data": DATA, "app/models": MODELS,
    "app/plan": PLAN, "app/process": PROCESS, "app/report": REPORT, "app/session": SESSION,
    "app/launch": LAUNCH, "app/train": TRAIN, "app/cli": CLI, "clients": CLIENTS,
}  # fmt: skip


@pytest.mark.parametrize("room", TABLES)
def test_what_errors_say_to_do_is_in_the_table(room: str) -> None:
    require_complete([room], TABLES[room])


@pytest.mark.parametrize("room", TABLES)
def test_a_remedy_that_an_error_names_works(room: str) -> None:
    run(TABLES[room])
