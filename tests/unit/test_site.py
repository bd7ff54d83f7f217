"""The documentation site builds in strict mode and without the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import pytest

import internsp
from internsp.app.report.svg import draw_timeline
from internsp.base.trace import Event
from tools.docs import pages
from tools.docs.docstrings import in_markdown
from tools.docs.picture import picture

ROOT = Path(__file__).parents[2]
# mkdocs, where any connection is an error.
OFFLINE = """
import socket, sys
def refuse(*args): raise OSError(f"the site asked the network: {args[1:]}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli()
"""
# What a browser fetches by itself; a link waits for a click.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'> ]*)"
    r"|(?:url\(|@import )[\"']?((?:https?:)?//[^\"') ]*)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


def test_every_document_is_a_page_and_links_lead_somewhere(site: Path) -> None:
    """mkdocs itself checks links within pages and to anchors: a wrong one fails the build."""
    for document in (ROOT / "docs").rglob("*.md"):
        assert (site / document.relative_to(ROOT / "docs")).with_suffix(".html").is_file()
    for page in (*pages.ELSEWHERE.values(), "reference/configuration.md"):
        assert "<h1" in (site / page).with_suffix(".html").read_text()
    home = (site / "index.html").read_text()
    assert 'href="howto/several_machines.html"' in home
    own = (site / "howto/sequences_in_my_model.html").read_text()
    assert 'href="../source/model_zoo/llama.py.html"' in own
    assert "DistributedAttention" in (site / "source/model_zoo/llama.py.html").read_text()


def test_every_public_name_has_a_place_in_the_api(site: Path) -> None:
    ids = {
        one
        for page in (site / "api").glob("*.html")
        for one in re.findall(r'id="(internsp[\w.]*)"', page.read_text())
    }
    for name in internsp.__all__:
        if isinstance(getattr(internsp, name), types.ModuleType) and name != "train":
            assert any(one.startswith(f"internsp.{name}.") for one in ids), name
        else:  # the function `train` by its module: the package has the name, too
            assert {f"internsp.{name}", f"internsp.app.train.trainer.{name}"} & ids, name
    assert {"internsp.ZeroOptimizer.step", "internsp.train"} <= ids
    assert not [one for one in ids if re.search(r"\._[a-z]", one)], "what is private is not shown"


def test_a_browser_fetches_nothing_from_elsewhere(site: Path) -> None:
    found = {
        (path.name, *match)
        for path in site.rglob("*")
        if path.suffix in (".html", ".css")
        for match in FETCHED.findall(path.read_text())
    }
    assert found == set()
    assert FETCHED.search('<link rel="stylesheet" href="https://fonts.example/x.css">')
    assert FETCHED.search("<script src=//cdn.example/x.js>")
    assert 'class="mermaid"' not in (site / "dev/architecture.html").read_text()


def test_a_public_name_without_a_page_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internsp, "_HOMES", {"Nowhere": "internsp.nowhere"})
    with pytest.raises(LookupError, match=r"no page for internsp\.Nowhere"):
        pages.api_pages()


def test_links_are_rewritten_outside_of_code_alone() -> None:
    text = "[a](../internsp/mesh/axes.py) [b](dev/fuzz.md#how) [c](https://x.org) [d](no.md)\n"
    text += "```\n[a](../internsp/mesh/axes.py)\n```\n"
    sources: set[str] = set()
    found = pages.rewritten(text, "docs/x.md", "x.md", sources)
    assert found.splitlines()[0] == (
        "[a](source/internsp/mesh/axes.py.md) [b](dev/fuzz.md#how) [c](https://x.org) [d](no.md)"
    )
    assert found.splitlines()[2] == "[a](../internsp/mesh/axes.py)"
    assert sources == {"internsp/mesh/axes.py"}
    link = "[p](../../docs/howto/rules.md)"
    found = pages.rewritten(link, "internsp/wp/README.md", "dev/invariants.md", sources)
    assert found == "[p](../howto/rules.md)"


def test_docstrings_become_markdown() -> None:
    text = "Of :class:`X`::\n\n    code\n\nArgs:\n    k, v: ``[B]``,\n        both.\n    w: one.\n"
    assert in_markdown(text) == (
        "Of `X`:\n\n    code\n\nArgs:\n    k: ``[B]``,\n        both.\n    v: ``[B]``,\n"
        "        both.\n    w: one.\n"
    )


def test_the_picture_of_a_step_is_the_reports_timeline_with_its_colors() -> None:
    drawn = draw_timeline({0: [Event("WAIT", "layers.0", "w", "forward", 0.0, 1.0, 8)]})
    made = picture(f"<p>{drawn.svg}</p>")
    root = ElementTree.fromstring(made)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert int(root.attrib["width"]) > int(root.attrib["height"]) > 20
    assert 'class="timeline"' in made
    assert ".wait {" in made
    with pytest.raises(ValueError, match="no step was traced"):
        picture("<p></p>")
