"""The Work object that a call of the shoal backend returns: wait for it, query it, or turn it into a future."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from shoal.comm.point_to_point import PostedReceive
from shoal.comm.progress import Task, TaskQueue

NO_TIMEOUT = timedelta(0)


class Collective(Work):  # type: ignore[misc]
    """A collective or message in progress."""

    def __init__(self, queue: TaskQueue, task: Task, result: list[torch.Tensor], timeout_s: float) -> None:
        super().__init__()
        self._queue, self._task, self._result, self._timeout_s = queue, task, result, timeout_s

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self._task.done:
            self._queue.wait(self._task, timeout.total_seconds() or self._timeout_s)
        elif self._task.error is not None:
            raise self._task.error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._task.done

    def is_success(self) -> bool:
        return self._task.done and self._task.error is None

    def exception(self) -> Any:
        return self._task.error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._result

    def source_rank(self) -> int:
        return self._source_rank()

    def _source_rank(self) -> int:
        return self._task.source if isinstance(self._task, PostedReceive) else -1

    def get_future(self) -> Future:
        done: Future = Future()

        def finished(_: Future) -> list[torch.Tensor]:
            # Raised here instead of set on the future: DDP crashes on the latter.
            if self._task.error is not None:
                raise self._task.error
            return self._result

        following: Future = done.then(finished)
        self._task.when_done(lambda: done.set_result(None))
        if not self._task.done:
            self._queue.call_worker()
        return following
