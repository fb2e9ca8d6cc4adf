"""Peak memory of a piece of work, without what the system can take back.

Networks on disk are mapped: their pages count as resident although they are the file itself, and the system drops them
whenever it needs room. What a program really holds is its anonymous memory, `RssAnon` in /proc/<pid>/status. It is read
every 20 ms for this process and all its children, and what was held before the work began is taken off.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

EVERY = 0.02


def anonymous_bytes(pid: int) -> int:
    """Anonymous resident memory of a process and its descendants; 0 for one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text(encoding="ascii").split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    lines = [line.split() for line in status.splitlines() if line.startswith("RssAnon:")]
    return 1024 * sum(int(line[1]) for line in lines) + sum(anonymous_bytes(child) for child in children)


class Peak:
    """Context manager; afterwards `nbytes` is the peak above what was held at its start."""

    def __enter__(self) -> Self:
        self._start = anonymous_bytes(os.getpid())
        self.nbytes = 0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._over.wait(EVERY):
            self.nbytes = max(self.nbytes, anonymous_bytes(os.getpid()) - self._start)
