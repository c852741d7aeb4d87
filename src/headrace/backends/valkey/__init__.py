"""Queues on Valkey (or Redis 7), in the key layout of glide-mq: many brokers and Node processes share them.

Read in this order: keys, url, connection, library (the Lua functions in lua/), arguments (what they are given), hashes
(jobs as Valkey has them), then the verbs by subject, joined in backend.
"""
