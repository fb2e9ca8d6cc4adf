"""Executors, where work runs: in this process, in several processes, on Ray."""

from onebasin.parallel.choose import executor_for, open_executor
from onebasin.parallel.executor import Executor, Progress, SerialExecutor, one_thread, threads_for
from onebasin.parallel.progress import TimeLeft, duration, progress_of
from onebasin.parallel.serialize import align_tensors, pickle_by_value, serialized_copy

__all__ = [
    "Executor",
    "Progress",
    "SerialExecutor",
    "TimeLeft",
    "align_tensors",
    "duration",
    "executor_for",
    "one_thread",
    "open_executor",
    "pickle_by_value",
    "progress_of",
    "serialized_copy",
    "threads_for",
]
