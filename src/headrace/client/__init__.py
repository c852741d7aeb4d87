"""Talking to queues: over sockets or to an engine in this process, from coroutines or from threads.

Reading order: `urls`, `policy` and `conversation` (what a connection does, without I/O), `link` and `pool` (sockets),
`line` and `client` (the thread that all of it lives in, and the async and blocking access to it), `verbs` (one
implementation for both), then what users hold: `queue`, `job`, `flow`, `events`.
"""
