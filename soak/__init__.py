"""The long mixed run: everything at once under load, while processes, sockets, disks and Valkey fail.

`python -m soak --minutes 20 --seed 7` (or `make soak`). Reading order: `ledger` (what the load writes down), `load`
(what producers and workers do), `stage` (the processes), `faults` (what goes wrong, and when), `accounts` (what the
stores say happened), `verdict` (the promises, checked), `__main__` (the run).
"""
