"""Testing code that enqueues jobs and tasks that run them: a real engine in memory, and a clock that tests control.

`bench` is the test bench, `plugin` provides it to pytest as the fixture `headrace_app`.
"""
