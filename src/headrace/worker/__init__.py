"""Running jobs: a worker takes jobs from queues, runs a handler for each, and reports how they ended.

Reading order: `attendant` (the part on the line: pulls, leases, outcomes), `context` (what a handler receives),
`processes` (handlers that must be killable), `worker` (the part on the user's loop that ties them together).
"""
