"""A checkpoint of a session, whole when it returns: a run saves while it trains."""

from __future__ import annotations

from pathlib import Path

from internsp.app.checkpoint.saver import Saver
from internsp.app.session.session import Session


def save(session: Session, folder: Path, step: int, run: str, sequences: int = 0) -> Path:
    """Write ``folder/step-N`` and wait until it is valid. Collective; raises as :class:`Saver`."""
    saver = Saver(session, folder, run)
    try:
        saver.start(step, sequences)
        path = saver.finish()
    finally:
        saver.close()
    assert path is not None, "finish() raises, or there is a checkpoint"
    return path
