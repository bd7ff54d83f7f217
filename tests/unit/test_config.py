"""Configurations: what is accepted, what is refused, and that all errors are named at once."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from internsp.app.config import (
    Config,
    TrainConfig,
    load_config,
    read_config,
    sections,
)
from internsp.app.config.sections import (
    DocumentsConfig,
    EvaluationText,
    LaunchConfig,
    MixturePart,
    OptimizerConfig,
    ParallelConfig,
    ParameterGroup,
    ReportConfig,
)
from internsp.config import (
    ActivationCheckpointConfig,
    PlanRule,
    Section,
    WeightParallelConfig,
    former,
)
from internsp.config.former import GONE, MOVED, answer
from internsp.config.model import ModelConfig
from internsp.config.words import keys_of, listed, section_name, table_class
from internsp.errors import ConfigError
from tools.docs.configuration import documented

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def mistakes(tmp_path, monkeypatch):
    """The lines below the heading of the report on a TOML text, which must be refused."""
    monkeypatch.chdir(tmp_path)

    def of(text: str, overrides: dict | None = None, world_size: int | None = None) -> list[str]:
        Path("run.toml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config("run.toml", overrides, world_size=world_size)
        heading, *lines = str(caught.value).splitlines()
        count = f"{len(lines)} mistake" + ("s" if len(lines) > 1 else "")
        assert heading == f"run.toml: {count}"
        return [line.removeprefix("  ") for line in lines]

    return of


def test_all_mistakes_of_file_and_overrides_are_reported_at_once(mistakes):
    text = """
    steps = 3
    launch = "four"
    [modle]
    layerz = 4
    [whatever]
    [parallel]
    weight = "2"
    sequence = 0
    [weight_parallel]
    overlap = 1
    gather_before_modules = "wo"
    gather_before = "out_porj"
    [activation_checkpoint]
    blocks = [0, -1]
    fraction = 1.5
    [optimizer]
    betas = [0.9, "x"]
    other = "sgd"
    learning_rate = 0.1
    warmup_steps = 2.5
    [data]
    source = "text"
    paths = ["nowhere"]
    held_out = 1
    [train]
    lr = 0.1
    name = "a/b"
    """
    overrides = {
        "train": {"steps": "x"},
        "parallel.optimizer_ranks": "all",
        "paralel.pipeline": "1",
        "optimizer.max_grad": "1",
        "seed": "3",
    }
    assert mistakes(text, overrides) == [
        "steps: is outside any section; did you mean train.steps?",
        "launch: is a section: write [launch] and its keys below",
        "[modle]: unknown section; did you mean [model]?",
        "[whatever]: unknown section; sections: model, data, parallel, pipeline, "
        "weight_parallel, sequence, activation_checkpoint, optimizer, train, checkpoint, report, "
        "launch",
        '--train.steps: expected a whole number, got "x"',
        '--parallel.optimizer_ranks: expected a whole number or "none", got "all"',
        "--paralel.pipeline: unknown option; did you mean --parallel.pipeline?",
        "--optimizer.max_grad: unknown key; did you mean --optimizer.max_grad_norm?",
        "--seed: unknown option; did you mean --train.seed?",
        "model.layerz: unknown key; did you mean model.layers?",
        "data.held_out: must be less than 1.0, got 1",
        'parallel.weight: expected a whole number, got "2"',
        "parallel.sequence: must be at least 1, got 0",
        "weight_parallel.overlap: expected true or false, got 1",
        'weight_parallel.gather_before: expected "qkv", "attention", "out_proj", "mlp" or '
        '"rolling", got "out_porj"; did you mean "out_proj"?',
        'weight_parallel.gather_before_modules: expected a list, got "wo"',
        "activation_checkpoint.fraction: must be at most 1.0, got 1.5",
        "activation_checkpoint.blocks: entry 2: must be at least 0, got -1",
        'optimizer.other: expected "adamw" or "none", got "sgd"',
        'optimizer.betas: entry 2: expected a number, got "x"',
        "optimizer.warmup_steps: expected a whole number, got 2.5",
        "optimizer.learning_rate: unknown key; did you mean optimizer.lr?",
        'train.name: must be usable as the name of a folder, got "a/b"',
        "train.lr: unknown key; did you mean optimizer.lr?",
        "data.paths: no such file or folder: nowhere",
    ]


@pytest.mark.parametrize(
    ("text", "world_size", "expected"),
    [
        (
            "[model]\nheads = 3",
            1,
            "model.heads: 3 heads do not divide hidden_size = 256; change one, or give "
            "model.head_dim",
        ),
        (
            "[model]\nhidden_size = 12",
            1,
            "model.heads: 3 features a head, but rotary embedding needs an even number",
        ),
        (
            "[model]\nhead_dim = 9",
            1,
            "model.head_dim: 9 features a head, but rotary embedding needs an even number",
        ),
        (
            "[model]\nkv_heads = 3",
            1,
            "model.kv_heads: 3 key/value heads do not divide heads = 4",
        ),
        (
            "[model]\nvocab_size = 256",
            1,
            "model.vocab_size: bytes need 257 ids (256 and the end of a document), got 256",
        ),
        (
            '[data]\nsource = "jsonl"',
            1,
            'data.paths: data.source = "jsonl" needs at least one file or folder',
        ),
        (
            '[data]\npaths = ["."]',
            1,
            'data.paths: unused with data.source = "stdlib"; set data.source to "text", "jsonl", '
            '"parquet", "datasets" or "tokens"',
        ),
        (
            '[data]\ntokenizer = "no.json"',
            1,
            'data.tokenizer: no such file or folder: no.json (or "bytes" for no tokenizer)',
        ),
        (
            "[data]\nsequence_length = 2\n[parallel]\nsequence = 3",
            3,
            "data.sequence_length: 2 tokens cannot be split over 3 ranks",
        ),
        (
            "[parallel]\nweight = 4\n[train]\nglobal_batch = 6",
            6,
            "parallel.weight: 4 does not divide the 6 ranks (launch.processes, or torchrun's); "
            "choose one of [1, 2, 3, 6]",
        ),
        (
            "[parallel]\nsequence = 2",
            None,
            "parallel.sequence: 2 does not divide the 1 rank (launch.processes, or torchrun's); "
            "choose one of [1]",
        ),
        (
            "[parallel]\npipeline = 2",
            2,
            'train.micro_batches: 1 are too few for "1F1B", which needs 2 or more',
        ),
        (
            "[parallel]\npipeline = 2\n[train]\nmicro_batches = 2",
            3,
            "parallel.pipeline: 2 does not divide the world of 3 ranks (launch.processes, or "
            "torchrun's); choose one of [1, 3]",
        ),
        (
            '[sequence]\nring_form = "double"\ninner_ring = 2',
            1,
            'sequence.ring_form: "double" of a ring of one rank: make a mesh with a ring, '
            'or use "auto"',
        ),
        (
            '[parallel]\nsequence = 4\n[sequence]\nring = 4\nring_form = "double"',
            4,
            "sequence.inner_ring: 1 does not split into smaller rings the 4 ranks; choose "
            "one of [2]",
        ),
        (
            '[parallel]\nsequence = 2\n[sequence]\nring = 2\nring_form = "double"\n'
            "inner_ring = 2",
            2,
            "sequence.inner_ring: 2 does not split into smaller rings the 2 ranks; use "
            'ring_form = "ring"',
        ),
        (
            "[parallel]\nsequence = 4\n[sequence]\nring = 4\ninner_ring = 2",
            4,
            'sequence.inner_ring: 2 is of no effect with "auto"; set ring_form = "double", '
            "or leave it out",
        ),
        (
            "[pipeline]\nchunks = 2",
            2,
            "pipeline.chunks: 2 chunks without a pipeline; set parallel.pipeline above 1, or use 1",
        ),
        (
            '[parallel]\npipeline = 2\n[pipeline]\nschedule = "DualPipeV"\n'
            "[train]\nmicro_batches = 4",
            2,
            'pipeline.chunks: schedule "DualPipeV" takes 2, not 1',
        ),
        (
            "[parallel]\npipeline = 2\n[train]\nmicro_batches = 2\n"
            '[weight_parallel]\nunexpected_order = "learn"',
            2,
            'weight_parallel.unexpected_order: "learn" in a pipeline: the passes of a step are '
            "planned before it, in the order in which blocks are declared; declare them as they "
            "run and leave it out",
        ),
        (
            "[parallel]\npipeline = 2\n[train]\nmicro_batches = 2\n[model]\nlayers = 1",
            2,
            "model.layers: 1 blocks cannot fill 2 stages (pipeline = 2 x chunks)",
        ),
        (
            "[parallel]\noptimizer_ranks = 3\nweight = 2",
            8,
            "parallel.optimizer_ranks: 3 does not divide the 4 replicas of a weight shard; choose "
            "one of [1, 2, 4]",
        ),
        (
            "[parallel]\nweight = 2\nexpert_weight = 16",
            8,
            "parallel.expert_weight: 16 x expert=1 = 16 does not divide the 8 ranks "
            "(launch.processes, or torchrun's); choose a product among [1, 2, 4, 8]",
        ),
        (
            "[train]\nglobal_batch = 3\nmicro_batches = 2\n[parallel]\nsequence = 2",
            4,
            "train.global_batch: 3 sequences are too few for 4 (micro_batches = 2 x data degree "
            "= 2)",
        ),
        (
            "[train]\nglobal_batch = 6\n",
            4,
            "train.global_batch: 6 sequences are no multiple of 4 (micro_batches = 1 x data "
            "degree = 4)",
        ),
        (
            "[weight_parallel]\ncompile = true",
            1,
            "weight_parallel.gather_before: lies inside a compiled block; use gather_before = "
            '"qkv" or "rolling" and no gather_before_modules',
        ),
        (
            '[weight_parallel]\ncompile = true\ngather_before = "qkv"\ngranularity = "module"',
            1,
            'weight_parallel.granularity: gathers module by module; a compiled block needs "block"',
        ),
        (
            "[weight_parallel]\nkeep_unsharded = 2000",
            1,
            "weight_parallel.keep_unsharded: there are 4 blocks (model.layers); a size has a unit, "
            'as "2 GiB"',
        ),
        (
            '[weight_parallel]\nquantize = "fp8"\n[train]\ndtype = "float16"', 1,
            "weight_parallel.quantize: float16 has no range for scales; use bfloat16 or float32",
        ),
        (
            '[activation_checkpoint]\nmode = "full"\nblocks = [3, 4, 7]',
            1,
            "activation_checkpoint.blocks: no block 4, 7: the model has 4 blocks, counted from 0",
        ),
        (
            "[optimizer]\nmomentum = 0.9",
            1,
            "optimizer.momentum: adamw has no momentum; set optimizer.betas, or optimizer.name = "
            '"sgd"',
        ),
        (
            '[model]\nfamily = "mixtral"\ntop_k = 9', 1,
            "model.top_k: a token cannot pass 9 of 8 experts",
        ),
        (
            '[model]\nfamily = "mixtral"\nexperts = 9\n[parallel]\nexpert = 2\n'
            "expert_weight = 1", 2,
            "parallel.expert: 2 owners do not divide 9 experts",
        ),
        (
            '[model]\nfamily = "deepseek"\n[activation_checkpoint]\ntiles = 2', 1,
            "activation_checkpoint.tiles: experts of deepseek take all tokens of a block at once: "
            "use 1",
        ),
        (
            '[checkpoint]\nresume = "runs/gone"',
            1,
            "checkpoint.resume: no such checkpoint: runs/gone",
        ),
    ],
)
def test_an_impossible_combination_is_one_clear_mistake(mistakes, text, world_size, expected):
    assert mistakes(text, world_size=world_size) == [expected]


def test_of_very_many_mistakes_the_first_are_printed_and_the_rest_counted():
    """Found by the fuzzer of configurations: a message of 10,000 characters (case 6622)."""
    lines = listed("run.toml", [f"mistake {number}" for number in range(100)]).split("\n")
    assert lines[0] == "run.toml: 100 mistakes"
    assert lines[-2:] == ["  mistake 29", "  and 70 more"]
    few = listed("run.toml", [f"mistake {number}" for number in range(30)])
    assert few.endswith("  mistake 29")


def test_a_wrong_value_does_not_cause_further_mistakes(mistakes):
    # With the default in place of the wrong weight degree, 3 would be wrong too.
    found = mistakes('[parallel]\nweight = "2"\noptimizer_ranks = 3', world_size=4)
    assert found == ['parallel.weight: expected a whole number, got "2"']


def test_broken_toml_is_reported_with_its_line_beside_wrong_overrides(mistakes):
    found = mistakes("[model]\nlayers = = 4\n", {"train.steps": "no"})
    assert found[0].startswith("not valid TOML: ")
    assert "line 2" in found[0]
    assert found[1:] == ['--train.steps: expected a whole number, got "no"']


def test_a_missing_file_is_reported_by_its_name(tmp_path):
    with pytest.raises(ConfigError, match=r"dmeo\.toml: 1 mistake\n  cannot be read: No such file"):
        load_config(tmp_path / "dmeo.toml")


def test_what_is_no_text_file_is_reported_in_plain_words(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML: 'utf-8' codec"):
        load_config(tmp_path / "binary.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_overrides_win_over_the_file_and_texts_take_the_type_of_the_key(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[train]\nsteps = "wrong"\nseed = 5\n[data]\nsource = "text"')
    config = load_config(
        file,
        {
            "train": {"steps": "7"},
            "data.paths": (str(file),),
            "weight-parallel.overlap": "false",
            "optimizer.max_grad_norm": "none",
            "optimizer.betas": ("0.5", "0.75"),
            "activation_checkpoint.blocks": ("0", "2"),
            "activation_checkpoint.mode": "full",
            "parallel.weight": 2,
        },
        world_size=2,
    )
    assert (config.train.steps, config.train.seed) == (7, 5)
    assert config.data.paths == (str(file),)
    assert config.weight_parallel.overlap is False
    assert config.optimizer.max_grad_norm is None
    assert config.optimizer.betas == (0.5, 0.75)
    assert config.activation_checkpoint.blocks == (0, 2)
    assert config.parallel.weight == 2


def test_a_configuration_written_as_toml_is_read_back_equal(tmp_path):
    config = Config(
        model=ModelConfig(kv_heads=2, rope_theta=5e5),
        weight_parallel=WeightParallelConfig(
            gather_before_modules=("*.wo",), compute_dtype="bfloat16"
        ),
        activation_checkpoint=ActivationCheckpointConfig(mode="full", blocks=(1, 3)),
        optimizer=OptimizerConfig(
            max_grad_norm=None,
            betas=(0.8, 0.99),
            groups=(
                ParameterGroup(match=("embed",), lr=0.1),
                ParameterGroup(match=("head",), weight_decay=0.0),
            ),
        ),
        train=TrainConfig(name="an example"),
        report=ReportConfig(alert='say "é"\n\\ '),
        launch=LaunchConfig(processes=2),
    )
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml())
    assert load_config(file) == config
    assert load_config(file) != Config()


def test_impossible_combinations_raise_when_it_is_made_and_the_mesh_is_checked_later():
    with pytest.raises(ConfigError, match="5 key/value heads do not divide heads = 4"):
        Config(model=ModelConfig(kv_heads=5))
    with pytest.raises(ConfigError, match=r'parallel\.weight: expected a whole number, got "2"'):
        ParallelConfig(weight="2")  # type: ignore[arg-type]
    config = Config(
        parallel=ParallelConfig(weight=2, sequence=3), train=TrainConfig(global_batch=2)
    )
    assert config.check(6) == []
    assert [line.partition(":")[0] for line in config.check(7)] == [
        "parallel.weight",
        "parallel.sequence",
    ]
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ActivationCheckpointConfig(mode="none"), ()),
        (ActivationCheckpointConfig(mode="full"), (0, 1, 2, 3, 4)),
        (ActivationCheckpointConfig(mode="full", fraction=0.3), (0, 1)),
        (ActivationCheckpointConfig(mode="selective", fraction=0.0), ()),
        (ActivationCheckpointConfig(mode="full", fraction=0.3, blocks=(4, 1, 4)), (1, 4)),
    ],
)
def test_selected_blocks_follow_the_list_or_the_fraction(config, expected):
    assert config.selected(5) == expected


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.name)
def test_every_config_of_the_project_is_right_on_any_machine(file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    load_config(file)


def test_the_documented_config_is_every_key_with_its_default_and_a_comment():
    text = (CONFIGS / "documented.toml").read_text()
    assert text == documented(), "python -m tools.docs.configuration"
    assert load_config(CONFIGS / "documented.toml") == Config()
    written = {name: list(keys) for name, keys in tomllib.loads(text).items()}
    assert written == {name: list(keys_of(cls)) for name, cls in sections().items()}
    assert all(f.description for cls in sections().values() for f in cls.model_fields.values())


def test_there_are_at_most_150_keys() -> None:
    """A table's keys are counted too, but those of documents only once."""
    names = [f"{name}.{key}" for name, cls in sections().items() for key in keys_of(cls)]
    for table in (PlanRule, ParameterGroup, MixturePart, EvaluationText):
        names += [f"{table.__name__}.{k}" for k in keys_of(table).keys() - keys_of(DocumentsConfig)]
    assert len(names) <= 150, sorted(names)


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (ActivationCheckpointConfig, "reentrant", True), (ModelConfig, "bias", True),
        (PlanRule, "forward_prefetch", 2),
        (PlanRule, "backward_prefetch", 0), (PlanRule, "pre_all_gather", "torch:neg"),
        (PlanRule, "post_all_gather", "torch:neg"),
    ],
)  # fmt: skip
def test_a_key_for_programs_is_refused_in_a_file(
    cls: type[Section], key: str, value: Any, tmp_path: Path
) -> None:
    text = f"{key} = {json.dumps(value)}\n"
    rule = cls is PlanRule
    section = "" if rule else section_name(cls)
    head = '[[weight_parallel.rules]]\nmatch = "a"\n' if rule else f"[{section}]\n"
    file = tmp_path / "run.toml"
    file.write_text(head + text)
    told = "is for programs alone, as an argument of its class"
    where = f"weight_parallel.rules: rule 1: {key}" if rule else f"{section}.{key}"
    assert [str(problem).partition(", got")[0] for problem in read_config(file)[1]] == [
        f"{where}: {told}"
    ]
    assert f"\n{key} = " not in documented()
    assert f"#   {key}: " not in documented()
    reentrant = load_config({"activation_checkpoint": {"mode": "full", "reentrant": True}})
    assert reentrant.activation_checkpoint.reentrant


def test_the_demo_uses_what_the_project_is_about():
    demo = load_config(CONFIGS / "demo.toml")
    assert (demo.parallel.weight, demo.parallel.sequence, demo.launch.processes) == (2, 2, 2)
    assert demo.weight_parallel.overlap
    assert demo.weight_parallel.memory_pool
    assert len(demo.activation_checkpoint.selected(demo.model.layers)) * 2 == demo.model.layers
    single = load_config(CONFIGS / "single.toml")
    assert (single.model, single.data, single.optimizer) == (demo.model, demo.data, demo.optimizer)
    assert single.train.steps == demo.train.steps, "the same learning rates"


def test_the_keys_of_a_section_are_told_once(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nqqqq = 1\nxxxx = 2\n[model]\nqqqq = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    lines = str(caught.value).splitlines()[1:]
    told = sorted(line.partition("; its keys: ")[0].strip() for line in lines)
    assert told == [f"{key}: unknown key" for key in ("model.qqqq", "train.qqqq", "train.xxxx")]
    assert ["its keys" in line for line in lines if "train." in line] == [True, False]


@pytest.mark.parametrize(
    ("key", "hint"), [("prefetch_dept", "did you mean prefetch_depth?"), ("zzz", "its keys: ")]
)
def test_a_section_made_in_a_program_names_the_nearest_of_its_keys(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"\.{key}: unknown key; {re.escape(hint)}"):
        WeightParallelConfig(**{key: 1})


@pytest.mark.parametrize("name", [*MOVED, *GONE])
def test_a_key_that_was_is_answered_with_what_it_became(name: str) -> None:
    at, _, key = name.rpartition(".")
    section, _, tables = at.partition(".")
    told = answer(at, key)
    assert told
    given = {section: {tables: [{"match": "a", key: 1}]} if tables else {key: 1}}
    assert any(str(problem).endswith(f"; {told}") for problem in read_config(given)[1])
    if not tables:
        line = f"--{name}: unknown key; {told}"
        option = {f"{section.replace('_', '-')}.{key.replace('_', '-')}": "1"}
        assert [str(p) for p in read_config({}, option)[1]] == [line]
        with pytest.raises(ConfigError, match=re.escape(told)):
            sections()[section](**{key: 1})


@pytest.mark.parametrize("name", MOVED.values())
def test_what_a_key_became_is_a_key(name: str) -> None:
    section, key, *inner = name.split(".")
    cls = sections()[section]
    if inner:
        cls, (key,) = table_class(cls, key), inner
    assert key in cls.model_fields


@pytest.mark.parametrize("name", GONE)
def test_the_rule_that_replaces_a_key_is_accepted(name: str) -> None:
    if rule := GONE[name].instead.partition("write a rule, [[weight_parallel.rules]] with ")[2]:
        words = re.sub(r" \(.*?\)", "", rule).replace(" and ", ", ")
        rule = tomllib.loads(f"rule = {{ {words} }}")["rule"]
        load_config({"weight_parallel": {"rules": [rule]}})


def test_a_name_that_was_elsewhere_leads_there_if_nothing_here_is_like_it() -> None:
    for values, told in (
        ({"train": {"ring_form": "double"}}, "did you mean sequence.ring_form?"),
        ({"train": {"embedding_cut": "hidden"}}, 'for "hidden" write a rule'),
        ({"own_dtype": []}, "write a rule"),
    ):
        (problem,) = read_config(values)[1]
        assert f"; {told}" in str(problem)


def test_rows_of_two_columns_are_answered_with_the_line_that_makes_chats_of_them() -> None:
    told = r"data\.format: rows of two columns are chats of two messages now; .*jq -c .*"
    table = {"name": "a", **JSONL, "format": "instruction"}
    for data in ({**JSONL, "format": "instruction"}, {"evaluation": [table]}):
        (problem,) = read_config({"data": data})[1]
        assert re.search(told.replace(r"\.format: ", ".*"), str(problem))
        assert str(problem).endswith('write format = "chat", got "instruction"')
    (problem,) = read_config({"data": {**JSONL, "format": "chats"}})[1]
    assert str(problem).endswith('"text" or "chat", got "chats"; did you mean "chat"?')


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (WeightParallelConfig, {"prefetch_depth": -1, "gather_before": "qvk", "overlap": 1}),
        (WeightParallelConfig, {"keep_unsharded": "2 GB", "blocks": "layers.*"}),
        (WeightParallelConfig, {"rules": [{"match": "a", "quantise": "int8"}, 3, {"unit": "each"},
                                         {"match": "a", "quantize": "int9", "shard_dim": "x"}]}),
        (WeightParallelConfig, {"rules": {"match": "a", "quantize": "int8"}}),
        (ActivationCheckpointConfig, {"mode": "ful", "fraction": 2, "tiles": "much"}),
        (ModelConfig, {"layers": 2.5, "heads": True, "path": "a\0b"}),
        (TrainConfig, {"name": "..", "steps": "x", "global_batch": 0}),
    ],
    ids=["numbers and choices", "types", "rules", "one rule", "recompute", "model", "application"],
)  # fmt: skip
def test_wrong_values_are_told_in_a_program_in_the_words_of_a_file(
    cls: type[Section], values: dict[str, Any]
) -> None:
    section = next(name for name, kind in sections().items() if kind is cls)
    with pytest.raises(ConfigError) as of_file:
        load_config({section: values})
    with pytest.raises(ConfigError) as of_program:
        cls(**values)
    heading, *lines = str(of_program.value).splitlines()
    assert heading == f"{cls.__name__}: {len(lines)} mistake{'s' * (len(lines) > 1)}"
    assert lines == str(of_file.value).splitlines()[1:]
    assert of_program.value.__cause__ is None
    assert of_program.value.__suppress_context__


@pytest.mark.parametrize(
    ("section", "key", "value", "told"),
    [
        ("activation_checkpoint", "tiles", "much",
         'expected "auto" or a whole number, got "much"'),
        ("activation_checkpoint", "tiles", 0, 'expected "auto" or must be at least 1, got 0'),
        ("weight_parallel", "keep_unsharded", "2 GB",
         'expected a number of blocks, a size such as "2 GiB", "all" or "none", got "2 GB"; did '
         'you mean "2 GiB"?'),
        ("optimizer", "betas", [0.1], "has too few entries, got [0.1]"),
        ("optimizer", "betas", [0.1] * 3, "must have at most 2 entries, got [0.1, 0.1, 0.1]"),
        ("weight_parallel", "rules", [{"match": "a", "forward_prefetch": 99}],
         "rule 1: forward_prefetch: must be at most 64, got 99"),
        ("report", "writers", ["tensorboard", "wandbb"],
         'entry 2: expected "tensorboard" or "wandb", got "wandbb"; did you mean "wandb"?'),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_of_several_forms_or_entries_is_told_by_all_or_by_the_wrong_one(
    section: str, key: str, value: Any, told: str
) -> None:
    (problem,) = read_config({section: {key: value}})[1]
    assert str(problem) == f"{section}.{key}: {told}"


def test_a_rule_by_itself_and_sections_within_a_config_are_told_so_too() -> None:
    with pytest.raises(ConfigError) as rule:
        PlanRule(match="layers.{9-3}", quantize="int9")  # type: ignore[arg-type]
    assert str(rule.value).splitlines() == [
        "PlanRule: 2 mistakes",
        "  match: 'layers.{9-3}' has {9-3}: write the smaller number first, 10000 at the most, got "
        '"layers.{9-3}"',
        '  quantize: expected "none", "int8" or "fp8", got "int9"; did you mean "int8"?',
    ]
    with pytest.raises(ConfigError) as whole:
        Config(model={"layers": 0}, train=3, weight_parallel={"rules": [{"match": "a"}]})  # type: ignore[arg-type]
    assert str(whole.value).splitlines() == [
        "Config: 3 mistakes",
        "  model.layers: must be at least 1, got 0",
        "  weight_parallel.rules: rule 1: a rule needs at least one pattern in match, and one more "
        "key",
        "  train: expected a section, got 3",
    ]


JSONL = {"source": "jsonl", "paths": ["."]}


@pytest.mark.parametrize(
    ("values", "key", "words", "remedy"),
    [
        ({"optimizer": {"loss_scale_init": 2.0}}, "optimizer.loss_scale_init", "float16",
         {"optimizer": {"loss_scale_init": 2.0}, "train": {"dtype": "float16"}}),
        ({"optimizer": {"name": "sgd", "betas": [0.1, 0.2]}}, "optimizer.betas", "sgd has none",
         {"optimizer": {"name": "muon", "betas": [0.1, 0.2]}}),
        ({"optimizer": {"name": "adafactor", "eps": 1e-3}}, "optimizer.eps", "adafactor has none",
         {"optimizer": {"name": "sgd", "other": "adamw", "eps": 1e-3}}),
        ({"checkpoint": {"keep_every": 5}}, "checkpoint.keep_every", "without it all are kept",
         {"checkpoint": {"keep_every": 5, "keep_last": 1}}),
        ({"model": {"top_k": 3}}, "model.top_k", "mixtral or deepseek",
         {"model": {"family": "mixtral", "top_k": 3}}),
        ({"model": {"family": "mixtral", "kv_heads": 3, "heads": 4}}, "model.kv_heads", "divide",
         {"model": {"family": "mixtral", "kv_heads": 2, "heads": 4}}),
        ({"data": {"text_field": "body"}}, "data.text_field", 'data.source = "jsonl"',
         {"data": {**JSONL, "text_field": "body"}}),
        ({"data": {**JSONL, "messages_field": "q"}}, "data.messages_field",
         'data.format = "chat"', {"data": JSONL}),
        ({"data": {"evaluation": [{"name": "a", "messages_field": "m"}]}}, "data.evaluation",
         "table 1: messages_field: of no effect here", {}),
        ({"optimizer": {"schedule": "constant", "min_lr_ratio": 0.5}}, "optimizer.min_lr_ratio",
         "another optimizer.schedule", {"optimizer": {"schedule": "linear", "min_lr_ratio": 0.5}}),
        ({"train": {"profile": "timeline", "profile_steps": [4, 6]}}, "train.profile_steps",
         'train.profile = "torch"', {"train": {"profile": "torch", "profile_steps": [4, 6]}}),
        ({"weight_parallel": {"reduction": "mean"}}, "weight_parallel.reduction", 'use "sum"', {}),
        ({"weight_parallel": {"grad_dtype": "float32"}}, "weight_parallel.grad_dtype",
         "ZeroOptimizer", {}),
        ({"weight_parallel": {"rules": [{"match": "layers", "grad_dtype": "float32"}]}},
         "weight_parallel.rules", "grad_dtype is for loops without", {}),
        ({"activation_checkpoint": {"mode": "full", "fraction": 0.1}},
         "activation_checkpoint.fraction", "0.1 of 4 blocks is less than one",
         {"activation_checkpoint": {"mode": "full", "fraction": 0.2}}),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)  # fmt: skip
def test_keys_that_others_leave_without_an_effect_are_refused(
    values: dict[str, Any], key: str, words: str, remedy: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(values)
    (line,) = str(refused.value).splitlines()[1:]
    assert line.startswith(f"  {key}: ")
    assert words in line
    load_config(remedy)


@pytest.mark.parametrize("off", [
    {"activation_checkpoint": {"mode": "none", "fraction": 0.5, "reentrant": True}},
    {"weight_parallel": {"compute_dtype": "none", "cast_inputs": False}},
    {"train": {"dtype": "float32"}, "optimizer": {"loss_scale_init": 2.0}},
    {"checkpoint": {"keep_last": 0, "keep_every": 5}},
], ids=str)  # fmt: skip
def test_details_of_what_is_said_to_be_off_may_stay(off: dict[str, Any]) -> None:
    load_config(off)


def test_positions_are_dealt_one_way_in_a_pipeline() -> None:
    ring = {"pipeline": 2, "sequence": 2}
    for balance, told in (("level", 1), ("zigzag", 0), ("auto", 0)):
        own = {"ring": 2, "balance": balance}
        values = {"parallel": ring, "sequence": own, "train": {"micro_batches": 2}}
        _, problems = read_config(values, world_size=4)
        assert [p.keys[0] for p in problems] == ["sequence.balance"] * told


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"family": "mixtral", "shared_size": 8}, "model.shared_size: of no effect here"),
        ({"dense_layers": 4}, "model.dense_layers: none of 4 blocks has experts"),
        ({"rotary_size": 7}, "model.rotary_size: 7 of 64 features a head"),
        ({"kv_heads": 2}, "model.kv_heads: every head of latent attention has its own key"),
    ],
)
def test_sizes_of_experts_that_a_program_gives_are_checked(
    model: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        Config(model={"family": "deepseek", **model})
    Config(model={"family": "deepseek"})


def test_what_a_run_kept_of_a_key_that_is_a_programs_now_is_read_if_it_is_the_default() -> None:
    kept = {"weight_parallel": {"compare_ranks": True, "overlap": True}}
    assert former.translated(kept) == ({"weight_parallel": {"overlap": True}}, {})
    told = former.translated({"weight_parallel": {"compare_ranks": False}})
    assert told == ({"weight_parallel": {"compare_ranks": False}}, {}), "refused by its name"
