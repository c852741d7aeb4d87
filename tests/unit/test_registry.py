"""The registry is complete, documented and consistent: what else is derived from it may rely on that."""

from __future__ import annotations

import re

import msgspec
import pytest
from msgspec import UNSET, Struct, inspect

from headrace.commands import REGISTRY, Flag, Spec
from headrace.commands._base import SHORT_FORMS
from headrace.commands.jobs import JobOptions, Push, PushEntry
from headrace.model import JobLinks, JobSettings, ShortQueueName
from headrace.server.routes import members_of


def _names(text: str) -> list[str]:
    return text.split()


# The commands of the protocol reference's summary table.
REFERENCE = _names("""
    PUSH PUSHB PULL PULLB ACK ACKB FAIL
    GetJob GetState GetResult GetJobs GetJobCounts GetCountsPerPriority GetJobByCustomId Count GetProgress
    GetChildrenValues
    Cancel Progress Update ChangePriority Promote MoveToDelayed Discard WaitJob Pause Resume IsPaused Drain
    Obliterate Clean ListQueues
    Dlq RetryDlq PurgeDlq RetryCompleted
    Cron CronDelete CronList CronGet
    Ping Hello Stats Metrics Prometheus StorageStatus Heartbeat JobHeartbeat JobHeartbeatB
    RegisterWorker UnregisterWorker ListWorkers
    AddWebhook RemoveWebhook ListWebhooks
    RateLimit RateLimitClear SetConcurrency ClearConcurrency
    AddLog GetLogs
    Auth
""")

# What the official clients and tools send beyond it.
EXTENSIONS = _names("""
    PUSHF SubscribeEvents UnsubscribeEvents TrimEvents UpdateParent MoveToWait MoveToWaitingChildren
    ChangeDelay PromoteJobs ExtendLock ExtendLocks GetDlqConfig SetDlqConfig GetStallConfig SetStallConfig
    GetDlqStats RemoveDlqJob GetQueueLimits ClearLogs GetFailedChildrenValues GetIgnoredChildrenFailures
    RemoveChildDependency RemoveUnprocessedChildren GetDeduplicationJobId RemoveDeduplicationKey
    RemoveJobDeduplicationKey SetWebhookEnabled CompactMemory
    GetGroupJobsCount GetGroupsJobsCount GetGroupActiveCount SetGroupRateLimit GetGroupRateLimit
    RemoveGroupRateLimit GetGroupRateLimitTtl SetGroupConcurrency GetGroupConcurrency RemoveGroupConcurrency
    PauseGroup ResumeGroup IsGroupPaused RateLimitGroup
    DashboardOverview DashboardQueues DashboardQueue DashboardHistory DashboardFailures
    Health Ready HeapStats QueuesSummary DlqPage SearchJobs DashboardCrons ReleaseLeases
    FlowStart FlowAdvance FlowGet FlowList FlowWait FlowCancel FlowSignal
    Events EventSegments EventSegment EventPosition ForgetEventPosition ScanJobs ScanResults ScanDlq
""")

CATEGORIES = {
    "Core", "Query", "Control", "DLQ", "Cron", "Monitoring", "Workers", "Webhooks", "Rate", "Logs", "Auth",
    "Families", "Flows", "Groups", "Dedup", "Events", "Dashboard",
}  # fmt: skip

ALL = list(REGISTRY.values())
by_name = pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)


def test_the_reference_table_has_62_commands_and_all_are_here() -> None:
    assert len(REFERENCE) == 62
    assert set(REFERENCE) <= set(REGISTRY)


def test_there_is_no_command_that_nobody_asked_for() -> None:
    assert set(REGISTRY) == set(REFERENCE) | set(EXTENSIONS)


@by_name
def test_every_command_is_documented_and_sorted(spec: Spec) -> None:
    doc = spec.type.__doc__ or ""
    assert doc.strip(), spec.name
    assert doc.strip().splitlines()[0].endswith((".", "?")), doc
    assert spec.category in CATEGORIES
    assert spec.name == spec.type.__struct_config__.tag


@by_name
def test_a_reply_leaves_room_for_the_request_id_in_a_short_map(spec: Spec) -> None:
    assert len(spec.reply.__struct_fields__) <= 14


@by_name
def test_no_time_or_duration_is_an_integer(spec: Spec) -> None:
    for struct in _structs_of(spec.reply):
        for field in struct.fields:
            if _is_time(field.encode_name):
                assert not _may_be(field.type, inspect.IntType), f"{struct.cls.__name__}.{field.name}"


@by_name
def test_absent_reply_fields_are_left_out_not_null(spec: Spec) -> None:
    for field in msgspec.structs.fields(spec.reply):
        if field.name != "ok" and not field.required:
            assert field.default is UNSET, field.name


@by_name
def test_every_field_of_a_command_has_a_precise_type(spec: Spec) -> None:
    for struct in _structs_of(spec.type):
        for field in struct.fields:
            assert not _may_be(field.type, inspect.AnyType), f"{struct.cls.__name__}.{field.name}"


@by_name
def test_path_parameters_are_fields(spec: Spec) -> None:
    names = {field.encode_name for field in msgspec.structs.fields(spec.type)}
    for route in spec.routes:
        assert route.method in {"GET", "POST", "PUT", "DELETE"}
        assert set(re.findall(r"{(\w+)}", route.path)) <= names


def test_routes_are_unique() -> None:
    # Two paths that differ only in the names of their parameters would be the same path.
    routes = [(route.method, re.sub(r"{\w+}", "{}", route.path)) for spec in ALL for route in spec.routes]
    assert sorted(set(routes)) == sorted(routes)


def test_get_routes_do_not_write_except_pulling() -> None:
    for spec in ALL:
        if any(route.method == "GET" for route in spec.routes) and spec.name != "PULL":
            assert Flag.WRITE not in spec.flags, spec.name


def test_only_auth_is_open() -> None:
    assert [spec.name for spec in ALL if Flag.OPEN in spec.flags] == ["Auth"]


def test_only_waiting_commands_block() -> None:
    assert {spec.name for spec in ALL if Flag.BLOCKING in spec.flags} == {
        "PULL",
        "PULLB",
        "WaitJob",
        "FlowWait",
        "Auth",
    }


@pytest.mark.parametrize("stored", [JobSettings, JobLinks])
@pytest.mark.parametrize("pushed", [JobOptions, Push, PushEntry])
def test_job_options_are_what_is_stored_of_a_job(stored: type[Struct], pushed: type[Struct]) -> None:
    options = {field.name: field for field in msgspec.structs.fields(pushed)}
    for field in msgspec.structs.fields(stored):
        assert field.name in options
        assert _default(options[field.name]) == _default(field), field.name


def test_the_own_id_of_a_job_is_called_job_id_in_push_and_custom_id_in_a_batch() -> None:
    names = {t: {f.name: f.encode_name for f in msgspec.structs.fields(t)} for t in (Push, PushEntry)}
    assert names[Push]["custom_id"] == "jobId"
    assert names[PushEntry]["custom_id"] == "customId"


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    # A push carries tuples, which share one empty default; the job it becomes has lists of its own.
    return list(field.default) if isinstance(field.default, tuple) else field.default


def _is_time(name: str) -> bool:
    lowered = name.lower()
    return lowered in {
        "time",
        "timestamp",
        "since",
        "ttl",
        "uptime",
        "duration",
        "prevts",
    } or lowered.endswith(("at", "ttl", "lastseen", "nextrun", "runat", "every", "triggered"))


@pytest.mark.parametrize("name", sorted(SHORT_FORMS))
def test_a_short_form_reads_its_fields_as_the_whole_command_does(name: str) -> None:
    whole = {field.name: field for field in msgspec.structs.fields(REGISTRY[name].type)}
    for field in msgspec.structs.fields(SHORT_FORMS[name]):
        assert (field.encode_name, field.default) == (whole[field.name].encode_name, whole[field.name].default)
        assert field.type == (ShortQueueName if field.name == "queue" else whole[field.name].type)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_list_that_a_command_takes_has_a_bound(name: str) -> None:
    for struct in _structs_of(REGISTRY[name].type):
        for field in struct.fields:
            for kind in members_of(field.type):
                if isinstance(kind, inspect.ListType | inspect.VarTupleType):
                    assert kind.max_length is not None, (struct.cls.__name__, field.name)


def _structs_of(root: type[Struct]) -> list[inspect.StructType]:
    found: dict[type, inspect.StructType] = {}
    pending: list[inspect.Type] = [inspect.type_info(root)]
    while pending:
        kind = pending.pop()
        if isinstance(kind, inspect.Metadata):
            pending.append(kind.type)
        elif isinstance(kind, inspect.UnionType):
            pending += kind.types
        elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
            pending.append(kind.item_type)
        elif isinstance(kind, inspect.DictType):
            pending.append(kind.value_type)
        elif isinstance(kind, inspect.StructType) and kind.cls not in found:
            found[kind.cls] = kind
            pending += [field.type for field in kind.fields]
    return list(found.values())


def _may_be(kind: inspect.Type, wanted: type[inspect.Type]) -> bool:
    if isinstance(kind, inspect.Metadata):
        return _may_be(kind.type, wanted)
    if isinstance(kind, inspect.UnionType):
        return any(_may_be(member, wanted) for member in kind.types)
    return isinstance(kind, wanted)
