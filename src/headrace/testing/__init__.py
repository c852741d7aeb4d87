"""Testing code that enqueues jobs and tasks that run them: a real engine in memory, and a clock that tests move.

`bench` is the workbench, `plugin` brings it to pytest as the fixture `headrace_app`.
"""
