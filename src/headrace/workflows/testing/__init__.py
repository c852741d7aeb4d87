"""Testing workflows, and testing providers of workflows.

`run_workflow` runs a flow without waiting, with fakes and injected failures; `Saga` implements any definition and
records what is called. `contract.WorkflowContract` is the suite that every provider passes (it needs pytest).
"""

from __future__ import annotations

from headrace.workflows.testing.rehearsal import InjectedFailure, Report, run_workflow
from headrace.workflows.testing.saga import Saga, define

__all__ = ["InjectedFailure", "Report", "Saga", "define", "run_workflow"]
