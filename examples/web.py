"""A web application with its jobs inside: FastAPI, a worker in the same process, the dashboard at /queue.

    pip install fastapi uvicorn
    uvicorn web:api --app-dir examples --timeout-graceful-shutdown 5

    curl -X POST 'localhost:8000/welcome?to=ada@example.com'
    open http://localhost:8000/queue/

With the URL of a server instead of a file the same program only produces; then run `headrace worker web:jobs` beside
it, and leave the dashboard to the server.
"""

from __future__ import annotations

import os

from fastapi import FastAPI, HTTPException

from headrace import Headrace
from headrace.contrib.asgi import Dashboard, lifespan

jobs = Headrace(os.environ.get("HEADRACE_URL", "sqlite:///web.db"))


@jobs.task(queue="emails", attempts=5)
async def welcome(to: str) -> str:
    return f"sent to {to}"


api = FastAPI(lifespan=lifespan(jobs, worker=True))
api.mount("/queue", Dashboard(jobs))


@api.post("/welcome", status_code=202)
async def start(to: str) -> dict[str, str]:
    job = await welcome.enqueue(to)
    return {"job": job.id}


@api.get("/welcome/{job_id}")
async def look(job_id: str) -> dict[str, str | None]:
    found = await jobs.queue("emails").get_job(job_id)
    if found is None:
        raise HTTPException(404, "there is no such job")
    return {"state": found.state, "result": found.result}
