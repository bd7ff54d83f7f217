"""Generates pages of the documentation site from other files: a hook of mkdocs (mkdocs.yml).

The documents are written for a reader of the repository: they link to each other and to sources by
path. For the site the README becomes the first page, each public name is listed in the API pages,
and each linked file becomes a page, so that links lead to the same text on the site. The site
needs no network access.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

import internsp

ROOT = Path(__file__).parents[2]

# Documents outside docs/, with their pages.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGES.md": "dev/changes.md",
    "CONTRIBUTING.md": "dev/contributing.md",
    "internsp/wp/README.md": "dev/invariants.md",
}
CONFIGURATION = "configs/documented.toml"

# Pages of the API: the title, and the modules that its names are imported from.
SUBJECTS = {
    "parallelize": ("A model becomes parallel", (
        "internsp.parallel", "internsp.mesh", "internsp.values")),
    "optimizer": ("The optimizer", ("internsp.optim",)),
    "sequences": ("Cut sequences", ("internsp.sp",)),
    "pipelines": ("Pipelines", ("internsp.pipeline",)),
    "runs": ("Runs from Python", ("internsp.app.train", "internsp.app.report")),
    "configuration": ("Configuration", ("internsp.config", "internsp.app.config")),
    "communicators": ("Weights and communicators", ("internsp.wp", "internsp.layers")),
    "looking": ("Plans and traces", ("internsp.schedule", "internsp.base.trace")),
    "errors": ("Errors", ("internsp.errors",)),
    "model_zoo": ("The model zoo", ("internsp.model_zoo",)),
}  # fmt: skip

LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def home_of(name: str) -> str:
    """The module of a public name, or the name itself if it is a module."""
    return internsp._HOMES.get(name, f"internsp.{name}")


def subject_of(name: str) -> str:
    """The page of a public name.

    Raises:
        LookupError: no page covers the module of the name: add it to `SUBJECTS`.
    """
    home = home_of(name)
    for subject, (_, modules) in SUBJECTS.items():
        if any(f"{home}.".startswith(f"{module}.") for module in modules):
            return subject
    raise LookupError(f"tools/docs/pages.py: no page for internsp.{name}, which {home} has")


def api_pages() -> dict[str, str]:
    """Markdown of each page of the API, by path; every public name occurs once."""
    found: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    for name in internsp.__all__:
        found[subject_of(name)].append(name)
    return {f"api/{subject}.md": _api_page(subject, names) for subject, names in found.items()}


def _api_page(subject: str, names: list[str]) -> str:
    title, modules = SUBJECTS[subject]

    def place(name: str) -> int:  # pages begin with the first module's names
        home = f"{home_of(name)}."
        return next(i for i, module in enumerate(modules) if home.startswith(f"{module}."))

    parts = [f"# {title}"]
    for name in sorted(names, key=place):
        path = f"internsp.{name}"
        options = (
            "show_root_heading: false" if home_of(name) == path else "heading: internsp." + name
        )
        parts.append(f"::: {path}\n    options:\n      {options}")
    return "\n\n".join(parts) + "\n"


def _source_page(path: str) -> str:
    text = (ROOT / path).read_text()
    longest = max((len(run) for run in re.findall(r"~{3,}", text)), default=2)
    fence = "~" * (longest + 1)
    language = {".py": "python", ".toml": "toml"}.get(Path(path).suffix, "text")
    return (
        f"---\nsearch:\n  exclude: true\nhide: [toc, navigation]\n---\n# {path}\n\n"
        f"{fence} {language}\n{text}{fence}\n"
    )


def outside_fences(change: Callable[[str], str], text: str) -> str:
    """Apply ``change`` to ``text`` outside code blocks."""
    parts, end = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[end : block.start()]), block.group()]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def page_of(target: str) -> str | None:
    """The site's page for a path in the repository; ``None`` if there is no such file."""
    if target in ELSEWHERE:
        return ELSEWHERE[target]
    if target == CONFIGURATION:
        return "reference/configuration.md"
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"source/{target}.md" if (ROOT / target).is_file() else None


def rewritten(text: str, document: str, page: str, sources: set[str]) -> str:
    """Rewrite the links of a document for its page.

    Args:
        text: the document, or a part of it.
        document: its path in the repository.
        page: the path of its page.
        sources: receives the files outside of docs/ that it links to.
    """
    folder = posixpath.dirname(document)

    def link(found: re.Match[str]) -> str:
        start, path, anchor = found.groups()
        target = posixpath.normpath(posixpath.join(folder, path))
        to = page_of(target)
        if to is None:
            return found.group()  # mkdocs warns about it
        if to.startswith("source/"):
            sources.add(target)
        return f"{start}{get_relative_url(to, page)}{anchor or ''}"

    return outside_fences(lambda part: LINK.sub(link, part), text)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the API pages to the navigation."""
    reference = next(part["Reference"] for part in config.nav or [] if "Reference" in part)
    python = next(part for part in reference if isinstance(part, dict) and "Python" in part)
    python["Python"] = list(api_pages())
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages, and rewrite the links of all pages."""
    made = api_pages()
    made["reference/configuration.md"] = (
        "# Configuration\n\nEvery key with its default, as `internsp init DIR --config documented` "
        f"writes it.\n\n```toml\n{(ROOT / CONFIGURATION).read_text()}```\n"
    )
    sources: set[str] = set()
    documents = {f"docs/{file.src_uri}": file.src_uri for file in files.documentation_pages()}
    for document, page in {**documents, **ELSEWHERE}.items():
        made[page] = rewritten((ROOT / document).read_text(), document, page, sources)
    for source in sorted(sources):
        made[f"source/{source}.md"] = _source_page(source)
    for page, text in made.items():
        if page in files.src_uris:
            files.remove(files.src_uris[page])
        files.append(File.generated(config, page, content=text))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Names of classes in tables may break between their words."""
    name = r"(?<=<td><code>)(?:[A-Z][a-z]+){2,}(?=</code>)"
    return re.sub(name, lambda found: re.sub(r"(?<=[a-z])(?=[A-Z])", "<wbr>", found[0]), html)


def on_page_context(context: dict[str, Any], *, page: Page, **_: Any) -> dict[str, Any]:
    """Pages have no edit link, because the URL of the repository is not known here."""
    page.edit_url = None
    return context
