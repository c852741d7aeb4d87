"""Doing the work: a worker takes jobs from queues, runs a handler for each, and tells how they ended.

Reading order: `attendant` (the part on the line: pulls, leases, outcomes), `context` (what a handler is given),
`processes` (handlers that must be killable), `worker` (the part on the user's loop that ties them together).
"""
