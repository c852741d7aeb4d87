"""How rows become jobs and jobs rows, without Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StructField, StructType, VariantType

from headrace.errors import HeadraceError
from headrace.pipeline.arrow import job_row
from headrace.pipeline.options import Options
from headrace.pipeline.writer import JobsWriter, RowsToJobs

MOMENT = datetime(2026, 10, 25, 0, 30, tzinfo=UTC)  # the first 2:30 of this night in Berlin


def jobs(batch: pa.RecordBatch, **options: str) -> list[tuple[str, dict[str, Any]]]:
    """The jobs that a batch becomes, each with its queue."""
    rows = RowsToJobs(Options.parse({"idColumns": "id", **options}), batch.schema.names)
    return [(command.queue, job) for command in rows.batches([batch]) for job in msgspec.msgpack.decode(command.jobs)]  # type: ignore[arg-type]


def test_a_row_is_the_same_job_in_every_time_zone() -> None:
    found = []
    for zone in ("UTC", "Europe/Berlin", "America/New_York"):
        times = pa.array([MOMENT], pa.timestamp("us", zone))
        nested = pa.StructArray.from_arrays([times, pa.array([[MOMENT]], pa.list_(times.type))], ["at", "all"])
        batch = pa.record_batch({"id": times, "nested": nested})
        found.append(jobs(batch, queue="q"))
    assert found[0] == found[1] == found[2]
    text = "2026-10-25T00:30:00Z"
    assert found[0][0][1]["data"] == {"id": text, "nested": {"at": text, "all": [text]}}


@given(st.integers(1, 38).flatmap(lambda digits: st.tuples(st.just(digits), st.integers(0, digits))), st.data())
def test_a_decimal_is_the_text_that_python_makes_of_it(size: tuple[int, int], data: st.DataObject) -> None:
    digits, places = size
    units = data.draw(st.lists(st.integers(1 - 10**digits, 10**digits - 1), min_size=1))
    amounts = [Decimal((unit < 0, tuple(map(int, str(abs(unit)))), -places)) for unit in units]
    batch = pa.record_batch({"id": pa.array(amounts, pa.decimal128(digits, places))})
    assert [job["data"]["id"] for _, job in jobs(batch, queue="q")] == list(map(str, amounts))


def test_maps_are_objects() -> None:
    given = pa.array([[("b", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    ((_, job),) = jobs(pa.record_batch({"id": pa.array([1]), "counts": given}), queue="q")
    assert job["data"] == {"id": 1, "counts": {"a": 2, "b": 1}}


@pytest.mark.parametrize(
    ("keys", "key", "text"),
    [
        (pa.int64(), 7, "7"),
        (pa.float64(), 1.5, "1.5"),
        (pa.date32(), MOMENT.date(), "2026-10-25"),
        (pa.timestamp("us", "Europe/Berlin"), MOMENT, "2026-10-25T00:30:00Z"),
        (pa.decimal128(4, 2), Decimal("1.20"), "1.20"),
    ],
)
def test_keys_of_maps_become_text(keys: pa.DataType, key: Any, text: str) -> None:
    given = pa.array([[(key, "a")]], pa.map_(keys, pa.string()))
    ((_, job),) = jobs(pa.record_batch({"id": pa.array([1]), "names": given}), queue="q")
    assert job["data"]["names"] == {text: "a"}


def test_no_number_that_a_float_can_hold_is_a_bigint_for_javascript() -> None:
    """Clients in JavaScript take every 64-bit integer of MessagePack for a BigInt."""
    wide, too_wide = 5_000_000_000, 2**63 - 1
    numbers = pa.array([1, wide, None, too_wide])
    nested = pa.array([[1], [wide], None, [too_wide]])
    found = jobs(pa.record_batch({"id": pa.array(range(4)), "n": numbers, "all": nested}), queue="q")
    assert [repr(job["data"]["n"]) for _, job in found] == ["1", "5000000000.0", "None", str(too_wide)]
    assert [repr(job["data"]["all"]) for _, job in found] == ["[1]", "[5000000000.0]", "None", f"[{too_wide}]"]


def test_numbers_in_json_text_are_what_javascript_makes_of_them() -> None:
    texts = ['{"n": 5000000000}', "123456789012345678901234567890", "1" + "0" * 400]
    batch = pa.record_batch({"id": pa.array(range(3)), "body": pa.array(texts)})
    found = [job["data"] for _, job in jobs(batch, queue="q", dataColumn="body")]
    assert [repr(data) for data in found] == ["{'n': 5000000000.0}", "1.2345678901234568e+29", repr(texts[2])]


def test_columns_of_one_name_are_refused_before_anything_is_written() -> None:
    batch = pa.record_batch([pa.array([1]), pa.array([2]), pa.array([3])], names=["id", "n", "n"])
    with pytest.raises(HeadraceError, match="several columns are called n: rename or drop"):
        jobs(batch, queue="q")


def test_a_variant_is_refused_with_what_to_write_instead() -> None:
    """Arrow has two binary fields of it, which would be the data of the job."""
    schema = StructType([StructField("id", LongType()), StructField("body", VariantType())])
    with pytest.raises(HeadraceError, match=r"the column body is a variant.*write to_json\(body\)"):
        JobsWriter(Options.parse({"queue": "q", "idColumns": "id"}), schema)


def test_rows_without_any_id_are_refused_and_not_taken_for_one_job() -> None:
    with pytest.raises(HeadraceError, match=r"a row has no id: id \(idColumns\) must not all be null"):
        jobs(pa.record_batch({"id": pa.array([1, None])}), queue="q")
    batch = pa.record_batch({"id": pa.array([1, None]), "part": pa.array([None, 2])})
    assert len({job["customId"] for _, job in jobs(batch, queue="q", idColumns="id,part")}) == 2


def test_no_two_values_are_the_same_id() -> None:
    """JSON has one word for four of these."""
    values = pa.array([float("nan"), float("inf"), float("-inf"), None, 0.0, 1.0])
    batch = pa.record_batch({"id": values, "part": pa.array([1] * 6)})
    assert len({job["customId"] for _, job in jobs(batch, queue="q", idColumns="id,part")}) == 6


def test_rows_go_to_the_queue_that_they_name_and_must_name_one() -> None:
    batch = pa.record_batch({"id": pa.array([1, 2]), "queue": pa.array(["a", "b"])})
    assert [(queue, job["data"]) for queue, job in jobs(batch)] == [("a", {"id": 1}), ("b", {"id": 2})]
    with pytest.raises(HeadraceError, match="a row names no queue"):
        jobs(pa.record_batch({"id": pa.array([1, 2]), "queue": pa.array(["a", None])}))


def test_the_queue_may_be_part_of_what_tells_rows_apart() -> None:
    batch = pa.record_batch({"id": pa.array([1, 1]), "queue": pa.array(["a", "b"])})
    found = jobs(batch, idColumns="queue, id")
    assert [(queue, job["data"]) for queue, job in found] == [("a", {"id": 1}), ("b", {"id": 1})]
    assert len({job["customId"] for _, job in found}) == 2


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (msgspec.msgpack.encode({"order": 5_000_000_000.0, "amount": 1.5}), '{"order":5000000000,"amount":1.5}'),
        (b"\x81\xa1n\xa2\xff\xfe", '{"n":"\ufffd\ufffd"}'),  # PHP sends texts that are no UTF-8
        (b"\x81\x80\x01", '{"{}":1}'),  # a map as a key
        (b"\xc7\x0c\xff\x00\x00\x00\x00\x7f" + 7 * b"\xff", None),  # a date after the year 9999
        (b"\xd4\x00\x00", None),  # JavaScript's undefined
    ],
)
def test_whatever_a_client_sent_as_data_can_be_read_as_json(payload: bytes, text: str | None) -> None:
    """One job must not make all the others unreadable."""
    job = {"id": "a", "queue": "q", "data": msgspec.Raw(payload), "createdAt": 1.5, "runAt": 2.0}
    row = job_row(msgspec.Raw(msgspec.msgpack.encode(job)))
    assert row["data"] == text
    assert (row["created_at"], row["started_at"], row["result"]) == (1_500, None, None)
