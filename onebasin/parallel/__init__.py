"""Where work runs: executors in this process, in several processes, on Ray."""

from onebasin.parallel.choose import ExecutionOptions, MemoryNeeds, execution_options_of, executor_for, open_executor
from onebasin.parallel.executor import Executor, SerialExecutor
from onebasin.parallel.progress import Progress
from onebasin.parallel.serialize import as_arrived, settled, travel_by_value
from onebasin.parallel.threads import one_thread, threads_for

__all__ = [
    "ExecutionOptions",
    "Executor",
    "MemoryNeeds",
    "Progress",
    "SerialExecutor",
    "as_arrived",
    "execution_options_of",
    "executor_for",
    "one_thread",
    "open_executor",
    "settled",
    "threads_for",
    "travel_by_value",
]
