"""The fuzzer of models on the command line, for any number of cases.

    python -m tests.fuzz.models --seed 7 --count 1000     many cases
    python -m tests.fuzz.models --seed 7 --case 123       repeat one of them
    python -m tests.fuzz.models --fault stale_reuse       with a deliberate fault in the library

Each failure is printed with the drawn case, a simplified case, and how to repeat it.
"""

from __future__ import annotations

import argparse
import collections
import pprint
import sys
import time
from collections.abc import Iterable

from tests.fuzz.draw import Case, draw
from tests.fuzz.faults import FAULTS
from tests.fuzz.runner import Result, run, shrink


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case only")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--world", type=int, choices=(2, 3, 4), help="draw for so many ranks")
    parser.add_argument("--without", default="", help="leave out cases with these features (a,b)")
    parser.add_argument("--only", default="", help="only cases with all of these features (a,b)")
    parser.add_argument("--fault", default="", choices=("", *FAULTS))
    parser.add_argument("--first", action="store_true", help="end at the first failure")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds a failure; 0: not")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--this", help="a case as printed: Case(...)")
    options = parser.parse_args()
    if options.this:
        return _report({0: eval(options.this, {"Case": Case})}, options)
    numbers = range(options.start, options.start + options.count)
    if options.case is not None:
        numbers = range(options.case, options.case + 1)
    without, only = set(options.without.split(",")), set(options.only.split(",")) - {""}
    drawn = {n: draw(options.seed, n, options.world) for n in numbers}
    chosen = {
        n: case for n, case in drawn.items()
        if not (without & case.features() or only - case.features())
    }  # fmt: skip
    if options.case is not None:
        print("\n".join(drawn[options.case].lines()))
    return _report(chosen, options)


def _report(chosen: dict[int, Case], options: argparse.Namespace) -> int:
    began = time.monotonic()
    deadline = began + 60 * options.minutes
    counts: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    failures = 0
    for batch in _batches(chosen):
        numbers = list(batch)
        results = run(list(batch.values()), options.fault, options.first, deadline)
        for number, result in zip(numbers, results, strict=False):
            counts[result.kind] += 1
            if result.kind == "refused":
                refusals[result.text[:100]] += 1
            if not result.failed:
                continue
            failures += 1
            tell(
                options.seed, number, result, options.shrink, options.fault, options.world
            )
            if options.first:
                return 1
        if time.monotonic() > deadline:
            break
    print(f"{sum(counts.values())} cases in {time.monotonic() - began:.0f} s: {dict(counts)}")
    for text, count in refusals.most_common(20):
        print(f"  {count} x {text}")
    return int(failures > 0)


def _batches(chosen: dict[int, Case], size: int = 100) -> Iterable[dict[int, Case]]:
    """Group cases by world size, so that one start of ranks serves each group."""
    for world in (2, 3, 4):
        own = [(n, case) for n, case in chosen.items() if case.world == world]
        for start in range(0, len(own), size):
            yield dict(own[start : start + size])


def tell(
    seed: int,
    number: int,
    result: Result,
    seconds: float,
    fault: str = "",
    world: int | None = None,
) -> str:
    """Print a failure, the simplest case found, and how to repeat it.

    Args:
        world: as given to ``draw``.
    """
    again = f"--seed {seed} --case {number}" + (f" --world {world}" if world else "")
    again += f" --fault {fault}" if fault else ""
    smaller = shrink(result, seconds, fault) if seconds else result
    lines = [
        f"case {number} of seed {seed}: {result.kind}",
        f"    {result.text}",
        *(f"    {line}" for line in result.case.lines()),
        f"  repeat: python -m tests.fuzz.models {again}",
    ]
    if smaller is not result:
        lines += ["  simplest form found:", f"    {smaller.text}"]
        lines += [f"    {line}" for line in smaller.case.lines()]
        lines.append(f"    {pprint.pformat(smaller.case, width=110)}")
    text = "\n".join(lines)
    print(text, flush=True)
    return text


if __name__ == "__main__":
    sys.exit(main())
