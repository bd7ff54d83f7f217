"""``python -m tools.docs.picture RUN FILE.svg``: the picture of one step, from a run's report.

The picture in docs/assets was made of a traced step of two local processes:

    internsp train configs/demo.toml --train.steps 8 --train.eval_batches 0 --parallel.sequence 1 \\
        --activation_checkpoint.mode none --activation_checkpoint.fraction 0 --checkpoint.save false
    python -m tools.docs.picture runs/demo docs/assets/step.svg
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

STYLE = Path(__file__).parents[2] / "internsp" / "app" / "report" / "templates" / "report.css"


def picture(report: str) -> str:
    """The timeline of a report's page as an image of its own, in the report's colors.

    Raises:
        ValueError: no step was traced.
    """
    found = re.search(r'<svg class="timeline" (viewBox="0 0 (\d+) (\d+)")(.*?</svg>)', report, re.S)
    if found is None:
        raise ValueError("the report has no timeline: no step was traced")
    box, width, height, rest = found.groups()
    style = re.sub(r"^(svg|svg\.timeline) \{[^}]*\}\n", "", STYLE.read_text(), flags=re.M)
    style += "svg { background:var(--card); }"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" {box}'
    start, body = rest.split(">", 1)
    return f'{head} width="{width}" height="{height}"{start}><style>{style}</style>{body}\n'


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs.picture", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run, with report.html")
    parser.add_argument("file", type=Path, help="the image to write")
    given = parser.parse_args()
    given.file.write_text(picture((given.run / "report.html").read_text()))


if __name__ == "__main__":
    main()
