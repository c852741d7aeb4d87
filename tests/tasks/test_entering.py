"""Entering and leaving an app: it may be done often, from several places at once, and the last one out closes it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace import Headrace
from headrace.errors import ClientClosed, StorageUnavailable


async def test_an_app_can_be_entered_again_after_it_was_left(tmp_path: Path) -> None:
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db")
    for count in (1, 2):
        async with app:
            await app.queue("q").add("job")
            assert (await app.queue("q").counts())["waiting"] == count


async def test_an_app_that_was_left_refuses_to_be_asked(tmp_path: Path) -> None:
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db")
    async with app:
        pass
    with pytest.raises(ClientClosed):
        await app.queue("q").add("job")


def test_threads_may_use_the_sync_face_one_after_the_other(tmp_path: Path) -> None:
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db")
    for count in (1, 2):
        with app.sync() as face:
            face.queue("q").add("job")
            assert face.queue("q").counts()["waiting"] == count


async def test_who_leaves_first_does_not_close_it_for_the_others() -> None:
    app = Headrace("memory://")
    async with app:
        with app.sync() as face:
            face.queue("q").add("job")
        async with app:
            pass
        assert (await app.queue("q").counts())["waiting"] == 1


async def test_an_app_that_is_closed_twice_or_used_again_leaves_others_of_its_url_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with Headrace(url) as other:
        app = Headrace(url)
        for _ in range(2):
            await app.close()
        async with app:
            await app.queue().add("job")
        await asyncio.to_thread(app.sync().close)
        assert await other.queue().count() == 1


async def test_who_could_not_enter_an_app_does_not_keep_it_open(tmp_path: Path) -> None:
    app = Headrace(f"sqlite:///{tmp_path}/later/jobs.db")
    with pytest.raises(StorageUnavailable):
        async with app:
            pass
    with pytest.raises(StorageUnavailable), app.sync():
        pass
    (tmp_path / "later").mkdir()
    async with app:
        await app.queue("q").add("job")
    with pytest.raises(ClientClosed):
        await app.queue("q").count()
