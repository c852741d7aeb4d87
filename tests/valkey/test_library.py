"""The function libraries: what they register, who owns them, when they are loaded and when they are left alone."""

from __future__ import annotations

import asyncio
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from headrace.backends.valkey import library
from headrace.backends.valkey.arguments import FUNCTIONS, RECORDS
from headrace.backends.valkey.backend import ValkeyBackend
from tests.conformance.rig import spec
from tests.valkeyserver import ValkeyServer

LUA = files("headrace.backends.valkey").joinpath("lua")
NODE = "#!lua name=glidemq\nredis.register_function('glidemq_version', function() return '93' end)"


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path) as server:
        yield server


def open_and_close(server: ValkeyServer) -> str:
    async def work() -> str:
        backend = ValkeyBackend(server.url)
        await backend.open()
        await backend.close()
        return backend.library_owner

    return asyncio.run(work())


def camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(word.title() for word in tail)


class TestArguments:
    def test_the_lua_files_name_the_same_arguments_as_the_table(self) -> None:
        text = "\n".join(path.read_text() for path in LUA.joinpath("headrace").iterdir())
        found = dict(re.findall(r"^\s*(?:bare_)?verb\('(\w+)', '([^']*)'", text, re.M))
        assert found == {name: arguments for name, (arguments, _) in FUNCTIONS.items()}

    def test_records_have_their_fields_in_the_order_of_the_arguments(self) -> None:
        assert FUNCTIONS["fail"][0].split() == [camel(field) for field in RECORDS["fail"].__struct_fields__]

    def test_repeated_records_are_as_long_as_the_lua_files_think(self) -> None:
        text = "\n".join(path.read_text() for path in LUA.joinpath("headrace").iterdir())
        lengths = {
            name: int(length) for length, name in re.findall(r"_ARGS = (\d+) -- fields of the record `(\w+)`", text)
        }
        repeated = ("NewJob", "PlainJob", "Completion", "Claiming", "Ending", "FlowEntry")
        assert lengths == {name: len(RECORDS[name].__struct_fields__) for name in repeated}

    def test_every_function_is_called_and_every_call_has_a_function(self) -> None:
        folder = files("headrace.backends.valkey")
        text = "\n".join(path.read_text() for path in folder.iterdir() if path.name.endswith(".py"))
        called = set(re.findall(r'_(?:call|act)\(\s*"(\w+)"', text))
        assert called == set(FUNCTIONS)


class TestOwnership:
    def test_a_bare_server_gets_both(self, fresh: ValkeyServer) -> None:
        owner = open_and_close(fresh)
        assert owner == library.GLIDEMQ_VERSION
        names = [row[1] if isinstance(row, list) else row["library_name"] for row in fresh.client().function_list()]
        assert sorted(names) == ["glidemq", "headrace"]

    def test_a_library_of_node_is_left_alone(self, fresh: ValkeyServer) -> None:
        fresh.client().function_load(NODE)
        assert open_and_close(fresh) == "93"
        assert fresh.client().fcall("glidemq_version", 0) == "93"

    def test_an_older_one_of_ours_is_replaced_and_a_newer_one_kept(self, fresh: ValkeyServer) -> None:
        for version, expected in (("40+headrace.0", library.GLIDEMQ_VERSION), ("40+headrace.999", "40+headrace.999")):
            fresh.client().function_load(NODE.replace("93", version), replace=True)
            assert open_and_close(fresh) == expected

    def test_node_may_take_over_while_we_work(self, fresh: ValkeyServer) -> None:
        async def work() -> None:
            backend = ValkeyBackend(fresh.url)
            await backend.open()
            await backend.insert_one("q", spec(1))
            fresh.client().function_load(NODE, replace=True)
            await backend.insert_one("q", spec(2))
            assert (await backend.counts("q")).waiting == 2
            await backend.look_after()
            assert backend.library_owner == "93"
            await backend.close()

        asyncio.run(work())

    def test_functions_that_were_flushed_are_loaded_again(self, fresh: ValkeyServer) -> None:
        async def work() -> None:
            backend = ValkeyBackend(fresh.url)
            await backend.open()
            fresh.client().function_flush()
            await backend.insert_one("q", spec(1))
            assert (await backend.counts("q")).waiting == 1
            await backend.close()

        asyncio.run(work())

    def test_ours_never_registers_a_name_of_the_other(self) -> None:
        assert "'glidemq_" not in library.headrace_source()

    def test_every_change_to_a_lua_file_is_a_new_revision(self) -> None:
        """After a change count REVISION up, and note here what it stands for."""
        text = "".join(library.sources().values())
        assert (library.REVISION, hashlib.sha256(text.encode()).hexdigest()[:16]) == (27, "453e4c33651e22ed")

    def test_a_version_of_ours_is_no_version_of_node(self) -> None:
        assert not library.GLIDEMQ_VERSION.isdigit()


class TestCommandLine:
    def test_init_loads_and_says_so(self, fresh: ValkeyServer) -> None:
        command = [sys.executable, "-m", "headrace", "valkey", "init", "--url", fresh.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        assert f"glidemq {library.GLIDEMQ_VERSION} (ours)" in done.stdout
        assert fresh.client().fcall("glidemq_version", 0) == library.GLIDEMQ_VERSION

    def test_the_printed_library_can_be_loaded_by_others(self, fresh: ValkeyServer) -> None:
        command = [sys.executable, "-m", "headrace", "valkey", "library", "glidemq"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        assert fresh.client().function_load(done.stdout) == "glidemq"

    def test_a_server_that_is_not_there_is_an_error_that_names_it(self) -> None:
        command = [sys.executable, "-m", "headrace", "valkey", "init", "--url", "valkey://127.0.0.1:1?timeout=1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 4
        assert "127.0.0.1:1 cannot be reached: Connection refused\n" in done.stderr
        assert "name another one with --url" in done.stderr
