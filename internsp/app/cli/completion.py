"""Shell completion of file names, added to the script that tyro writes for options."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from internsp.errors import MachineError

OPTIONS = ("--tyro-write-completion", "--tyro-print-completion")
SHELLS = ("bash", "zsh")  # tyro completes for these without another package

# tyro completes only options where a command takes a file (CONFIG.toml, RUN) or a value.
_BASH_FILES = """
_internsp_files() {
  local word="${COMP_WORDS[COMP_CWORD]}"
  _tyro_internsp
  if (( COMP_CWORD > 1 )) && [[ "$word" != -* ]]; then
    local IFS=$'\\n'
    COMPREPLY=($(compgen -f -- "$word"))
    compopt -o filenames 2>/dev/null
  fi
}
complete -F _internsp_files internsp
"""


def requested(words: Sequence[str]) -> bool:
    """Whether a command line asks for a completion script."""
    return words[:1] != [] and words[0] in OPTIONS


def mistake(words: Sequence[str]) -> str | None:
    """What is wrong with a request for a completion script, in one line; ``None`` if nothing."""
    if not requested(words):
        return None
    if len(words) > 1 and words[1] not in SHELLS:
        return f"{words[0]}: no completion for {words[1]}; there is one for {' and '.join(SHELLS)}"
    file = " FILE" if words[0] == OPTIONS[0] else ""
    wanted = f"{words[0]} {{{','.join(SHELLS)}}}{file}"
    return f"expected {wanted}" if len(words) != len(wanted.split()) else None


@contextmanager
def with_files(words: Sequence[str]) -> Iterator[None]:
    """Append completion of file names to the bash script that tyro writes in the context.

    Raises:
        SystemExit: as raised by tyro; 3 if the script cannot be written.
    """
    try:
        yield
    except SystemExit as end:
        if requested(words) and words[1] == "bash" and not end.code:
            if words[0] == OPTIONS[0]:
                with Path(words[2]).open("a") as script:
                    script.write(_BASH_FILES)
            else:
                print(_BASH_FILES)
        raise
    except OSError as error:
        if not requested(words) or isinstance(error, BrokenPipeError):
            raise
        print(f"internsp: {words[-1]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(MachineError.exit_status) from error
