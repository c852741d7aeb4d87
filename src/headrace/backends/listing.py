"""How much one reply can hold: a command that removes jobs and returns their ids must not remove more than fit."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.model import MAX_FRAME_BYTES

REPLY_ROOM: Final = MAX_FRAME_BYTES - 65_536
"""For what a reply lists. The rest is for what stands around it and for the last item."""
TOO_MANY_JOBS: Final = "Reply exceeds 64 MB: ask for fewer jobs with a lower limit"
TOO_MANY_LETTERS: Final = TOO_MANY_JOBS.replace("limit", "count")

_encode_json: Final = msgspec.json.Encoder().encode


class Listing:
    """Ids for one reply."""

    __slots__ = ("_room", "ids")

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._room = REPLY_ROOM

    @property
    def has_room(self) -> bool:
        """Whether one more id fits, however long."""
        return self._room > 0

    def add(self, job_id: str) -> None:
        self.ids.append(job_id)
        self._room -= len(_encode_json(job_id)) + 1  # with its comma; as MessagePack no id is longer
