"""``weight_parallel.keep_unsharded``: none, a number of blocks, a size, or all."""

from __future__ import annotations

from pathlib import Path

import pytest

from internsp.app.config import Config, load_config
from internsp.base.sizes import size_in_bytes
from internsp.config import WeightParallelConfig
from internsp.errors import ConfigError
from internsp.structure.kept import choose_kept_blocks

SIZES = [1 << 20] * 6
EXPECTED = 'expected a number of blocks, a size such as "2 GiB", "all" or "none"'
A_NUMBER = 'a number of blocks is at least 0 and at most 1000000000; a size has a unit, as "2 GiB"'


@pytest.mark.parametrize(
    ("given", "value", "blocks"),
    [
        (None, None, set()), ("none", None, set()), (0, 0, set()), (2, 2, {1, 3}),
        ("2", 2, {1, 3}), (9, 9, set(range(6))), ("all", "all", set(range(6))),
        ("2 MiB", "2 MiB", {1, 3}), ("2.5MiB", "2.5MiB", {1, 3}), ("1048576 B", "1048576 B", {2}),
        ("1048575 B", "1048575 B", set()), ("0 B", "0 B", set()),
        ("4 MiB", "4 MiB", set(range(6))), ("1024 TiB", "1024 TiB", set(range(6))),
    ],
)  # fmt: skip
def test_it_says_which_blocks_stay_and_survives_a_file(
    tmp_path: Path, given: object, value: object, blocks: set[int]
) -> None:
    config = WeightParallelConfig(keep_unsharded=given)  # type: ignore[arg-type]
    assert config.keep_unsharded == value
    assert choose_kept_blocks(config, SIZES, 1, {}) == blocks
    whole = Config(model={"layers": 9}, weight_parallel=config)  # type: ignore[arg-type]
    file = tmp_path / "run.toml"
    file.write_text(whole.to_toml())
    assert load_config(file) == whole
    if given is not None:
        file.write_text("[model]\nlayers = 9")
        again = load_config(file, {"weight_parallel.keep_unsharded": str(given)})
        assert again.weight_parallel.keep_unsharded == value


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("true", f"{EXPECTED}, got true"), ("1.5", f"{EXPECTED}, got 1.5"),
        ("[2]", f"{EXPECTED}, got [2]"), ('""', f'{EXPECTED}, got ""'),
        ("-1", f"{A_NUMBER}, got -1"), ("2000000000", f"{A_NUMBER}, got 2000000000"),
        ('"2 GB"', f'{EXPECTED}, got "2 GB"; did you mean "2 GiB"?'),
        ('"512 mib"', f'{EXPECTED}, got "512 mib"; did you mean "512 MiB"?'),
        ('"512 m"', f'{EXPECTED}, got "512 m"; did you mean "512 MiB"?'),
        ('"every"', f'{EXPECTED}, got "every"'),
        ('"al"', f'{EXPECTED}, got "al"; did you mean "all"?'),
        ('"ALL"', f'{EXPECTED}, got "ALL"; did you mean "all"?'),
        ('"-2 GiB"', f'{EXPECTED}, got "-2 GiB"'), ('"2 GiB "', f'{EXPECTED}, got "2 GiB "'),
        ('"2 layers"', f'{EXPECTED}, got "2 layers"'), ('"٢ GiB"', f'{EXPECTED}, got "٢ GiB"'),
        ('"1025 TiB"', 'a size is at most 1024 TiB, got "1025 TiB"'),
        ("3", 'there are 2 blocks (model.layers); a size has a unit, as "2 GiB"'),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_sentence_wherever_it_is_made(
    tmp_path: Path, written: str, told: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[model]\nlayers = 2\n[weight_parallel]\nkeep_unsharded = {written}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert str(raised.value).split("\n")[1:] == [f"  weight_parallel.keep_unsharded: {told}"]


def test_in_python_it_raises_as_the_other_options_do() -> None:
    with pytest.raises(ConfigError, match="expected a number of blocks, a size such as"):
        WeightParallelConfig(keep_unsharded="2 GB")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2 GiB", 2 << 30), ("1.5 KiB", 1536), ("7B", 7), ("0.1 MiB", 104857), ("2 gib", None),
     ("2", None), ("GiB", None), ("1e3 B", None), ("2  GiB", None)],
)  # fmt: skip
def test_a_size_is_a_number_and_a_binary_unit(text: str, nbytes: int | None) -> None:
    assert size_in_bytes(text) == nbytes
