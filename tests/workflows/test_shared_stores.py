"""The contract of workflows once more where many processes meet: on a real server and on Valkey without one.

All cases of test_contract and those of test_distributed that need no processes of their own; each exception is named
below. One server and one Valkey serve them all: tests use workflows and ids of their own.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from tests.scale import IS_FULL
from tests.valkeyserver import shared_server
from tests.workflows import test_contract, test_distributed

LEFT_OUT = {
    # No store takes part in these.
    "test_ew_165_execute_needs_a_started_provider_and_a_workflow",
    # They sit in files or start processes of their own.
    "test_ew_200_x19_the_store_grows_with_the_data_only",
    "test_ew_204_a_server_that_is_killed_and_started_again_goes_on_with_its_flows",
}
if not IS_FULL:
    # They wait for the margin of five seconds that is added to every timeout.
    LEFT_OUT |= {
        "test_ew_160_ew_186_x15_a_flow_that_takes_too_long_is_taken_back",
        "test_ew_199_a_detached_timeout_sends_only_the_waiter_away",
    }


def _is_here(name: str, test: Any) -> bool:
    is_case = name.startswith(("test_ew_", "test_x")) and name not in LEFT_OUT
    return is_case and "server_url" not in test.__annotations__


for _module in (test_contract, test_distributed):
    for _name, _value in vars(_module).items():
        if _is_here(_name, _value):
            globals()[_name] = _value


@pytest.fixture(params=["server", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "valkey":
        return f"{shared_server().url}?prefix=flows-{uuid4()}"
    return str(request.getfixturevalue("server_url"))
