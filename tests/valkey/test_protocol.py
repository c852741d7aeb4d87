"""The tests of the bunqueue protocol once more, against a server whose queues are on Valkey (see `server` in conftest).

What differs by design is in headrace.backends.valkey.differences and left out here by name. Those that are marked
with pytest.mark.alone are so here, too.
"""

from __future__ import annotations

from tests.protocol import (
    test_control,
    test_core,
    test_cron,
    test_dedup,
    test_dlq,
    test_events,
    test_families,
    test_flows,
    test_groups,
    test_id_ttl,
    test_limits,
    test_logs,
    test_queries,
    test_queues,
    test_workers,
)

DIFFERENT = {
    "test_data_of_ten_megabytes_passes_and_more_is_refused",  # payload size
    "test_search_finds_jobs_by_what_is_in_them_page_by_page",  # search
    "test_a_search_in_brief_shows_the_beginning_of_what_it_finds",  # search
    "test_trim_events_is_accepted_and_takes_nothing_from_the_one_log",  # TrimEvents
    "test_flows_and_their_logs_survive_kill_9",  # this one and the next two bring servers of their own
    "test_tombstones_survive_a_restart",
    "test_memory_servers_know_tombstones_too",
    "test_a_lease_is_resumed_in_a_queue_that_serves_groups_in_turn",  # claims: no lease is ever forgotten
}
listener = test_events.listener
_MODULES = (
    *(test_control, test_core, test_cron, test_dedup, test_dlq, test_events, test_families, test_flows),
    *(test_groups, test_id_ttl, test_limits, test_logs, test_queries, test_queues, test_workers),
)

for _module in _MODULES:
    for _name, _value in vars(_module).items():
        if _name.startswith(("test_", "Test")) and _name not in DIFFERENT:
            globals()[f"{_name}__{_module.__name__.rpartition('_')[2]}"] = _value
