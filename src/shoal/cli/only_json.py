"""What `--json` means: standard output carries one JSON object and nothing else, whatever a job or a library prints."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def only_json() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Standard output is for one JSON object: what a job or a library prints there goes to standard error."""
    import json

    from shoal.training.record.run import plain

    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)

    def show(outcome: dict[str, Any]) -> None:
        sys.stdout.flush()
        os.dup2(kept, 1)
        print(json.dumps(plain(outcome), allow_nan=False), flush=True)

    try:
        yield show
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
