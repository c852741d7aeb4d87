"""Log records that say which job they belong to: a filter for the handlers of whoever configures logging.

    handler.addFilter(JobFields())
    handler.setFormatter(logging.Formatter("%(asctime)s %(job_id)s %(message)s", defaults={"job_id": "-"}))

Records made while a job runs, in its handler or below it, get `job_id`, `queue`, `task` and `attempt`, and what else
`JobContext.log_fields` holds. Nothing else about logging is changed.
"""

from __future__ import annotations

import logging

from headrace.worker.context import running_job


class JobFields(logging.Filter):
    """Lets every record pass. It belongs on handlers: a filter on a logger does not see records of those below it."""

    def filter(self, record: logging.LogRecord) -> bool:
        job = running_job()
        if job is not None:
            fields = {"job_id": job.id, "queue": job.queue, "task": job.name, "attempt": job.attempt, **job.log_fields}
            for name, value in fields.items():
                record.__dict__.setdefault(name, value)
        return True
