"""The extra ``[train]``: what the command and the trainer need, and the library does not."""

from __future__ import annotations

from internsp.errors import MissingDependencyError

PACKAGES = ("filelock", "rich", "tomli_w", "tyro")


def explained(error: ModuleNotFoundError, what: str) -> ImportError:
    """``error``, or the line to run if ``what`` needs a package of the extra."""
    package = (error.name or "").partition(".")[0]
    if package not in PACKAGES:
        return error
    return MissingDependencyError(
        f"{what} needs {package}, which is not installed: pip install 'internsp[train]'"
    )
