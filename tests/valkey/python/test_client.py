"""The tests of the Python client once more: the engine in the process, its queues on Valkey."""

from __future__ import annotations

from tests.client import test_flow, test_job, test_queue
from tests.client.conftest import face, q, shared_client  # noqa: F401

DIFFERENT = ("test_batches_of_large_jobs_fit_their_frames",)  # payload size

for _module in (test_flow, test_job, test_queue):
    for _name, _value in vars(_module).items():
        if _name.startswith(("test_", "Test")) and _name not in DIFFERENT:
            globals()[f"{_name}__{_module.__name__.rpartition('_')[2]}"] = _value
