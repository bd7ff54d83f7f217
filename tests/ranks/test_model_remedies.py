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

from tests.ranks.test_remedies import right
from tests.support.meshes import mesh_of
from tests.support.models import Tiny, Twin
from tests.support.ranks import ranks
from tests.support.remedies import Table, require_complete, run

ROOMS = ["parallel"]


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

PARALLEL: Table = {
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
        "set weight_parallel.trigger = 'qkv' (the block's entry) and no prefetch_triggers":
            COMPILED,
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
TABLE: Table = PARALLEL


def test_what_errors_say_to_do_is_in_the_table() -> None:
    require_complete(ROOMS, TABLE)


PARTS = 2


@pytest.mark.parametrize("part", range(PARTS))
@ranks(2)
def test_a_remedy_that_an_error_names_works(part: int) -> None:
    run(TABLE, part, PARTS)
