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
    found = re.search(r'<svg (class="timeline"[^>]*)>(.*?)</svg>', report, re.DOTALL)
    if found is None:
        raise ValueError("the report has no timeline: no step was traced")
    head, bars = found.groups()
    _, _, width, height = head.partition('viewBox="')[2].partition('"')[0].split()
    style = re.sub(r"^(svg|svg\.timeline) \{[^}]*\}\n", "", STYLE.read_text(), flags=re.M)
    style += "svg { background:var(--card); }"
    sizes = f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    return f"<svg {sizes} {head}><style>{style}</style>{bars}</svg>\n"


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs.picture", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run, with report.html")
    parser.add_argument("file", type=Path, help="the image to write")
    given = parser.parse_args()
    given.file.write_text(picture((given.run / "report.html").read_text()))


if __name__ == "__main__":
    main()
