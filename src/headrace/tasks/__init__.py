"""Functions as jobs: an app created from a URL, tasks that keep their signature, workers that run them.

Reading order: `arguments` (calls as data and back), `task`, `app`.
"""
