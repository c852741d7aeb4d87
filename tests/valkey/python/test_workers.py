"""The tests of the Python worker once more: the engine in the process, its queues on Valkey."""

from __future__ import annotations

from tests.worker import test_handlers, test_tasks

DIFFERENT = (
    "test_large_results_come_back_from_many_jobs_at_once",  # payload size
    "test_a_handler_that_reports_in_a_loop_loses_none_of_its_last_lines",  # on a server of its own
)

for _module in (test_handlers, test_tasks):
    for _name, _value in vars(_module).items():
        if _name.startswith("test_") and _name not in DIFFERENT:
            globals()[f"{_name}__{_module.__name__.rpartition('_')[2]}"] = _value
