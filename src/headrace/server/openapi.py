"""The OpenAPI description of the HTTP side, made from the command registry: what is served is what is described.

Commands give their own part (fields, limits, replies, errors). What is no command (texts, pages, streams) is a line in
`_plain_paths`. Payloads are any JSON; a job is described by the views that it is encoded from.
"""

from __future__ import annotations

import inspect as source
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw, Struct, inspect

from headrace import __version__
from headrace.commands._base import REGISTRY, Flag, Route, Spec
from headrace.server.access import HEALTH_PATHS
from headrace.server.exchange import Request, Response
from headrace.server.routes import members_of
from headrace.views import HistoryView, LinksView, SettingsView

if TYPE_CHECKING:
    from headrace.server.httpsession import HttpSession

_REF: Final = "#/components/schemas/{name}"
_PARAMETER: Final = re.compile(r"{(\w+)}")
_ALWAYS: Final = {
    "400": "The request is not valid, or cannot be done",
    "401": "The token is missing or wrong",
    "403": "The Host or Origin is not allowed",
    "413": "The body or the reply exceeds 64 MB",
    "415": "The body is not JSON",
    "429": "Too many requests",
    "500": "An error of the server",
    "503": "The disk refuses, or there are too many connections",
}
Schema = dict[str, Any]


class JobView(Struct, rename="camel"):
    """A job as queries and pulls show it, together with its settings, links and history."""

    id: str
    queue: str
    data: Any
    created_at: float
    run_at: float
    last_heartbeat: float
    started_at: float | None
    completed_at: float | None
    attempts: int
    priority: int
    stall_count: int
    name: str = ""
    state: str = ""
    returnvalue: Any = None
    failed_reason: str = ""


class Description:
    """Serves /openapi.json; made when it is first asked for."""

    is_open = True

    def __init__(self) -> None:
        self._text = b""

    def serve(self, session: HttpSession, request: Request) -> Response:
        if not self._text:
            self._text = msgspec.json.encode(describe())
        return Response(200, self._text)


def describe() -> Schema:
    specs = [spec for spec in REGISTRY.values() if spec.routes]
    schemas = _schemas(specs)
    paths: dict[str, Schema] = _plain_paths()
    for spec in specs:
        for route in spec.routes:
            paths.setdefault(route.path, {})[route.method.lower()] = _operation(spec, route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": __version__,
            "description": "Job queue server. Every operation is a command of the protocol; see docs/protocol.md.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


# -- schemas -----------------------------------------------------------------------------------------------------------


def _schemas(specs: list[Spec]) -> dict[str, Schema]:
    types: list[Any] = [SettingsView, LinksView, HistoryView, JobView]
    types += [spec.type for spec in specs] + [spec.reply for spec in specs]
    _, found = msgspec.json.schema_components(types, schema_hook=_unknown, ref_template=_REF)
    schemas: dict[str, Schema] = dict(found)
    parts = [{"$ref": _REF.format(name=view.__name__)} for view in (JobView, SettingsView, LinksView, HistoryView)]
    schemas["Job"] = {"title": "Job", "description": "A job with its settings, links and history.", "allOf": parts}
    schemas["Error"] = {
        "title": "Error",
        "type": "object",
        "properties": {"ok": {"const": False}, "error": {"type": "string"}},
        "required": ["ok", "error"],
    }
    for spec in specs:
        _mark_jobs(schemas[spec.reply.__name__])
    return schemas


def _unknown(kind: type) -> Schema:
    """Payloads are whatever JSON can say."""
    if kind is Raw:
        return {}
    raise NotImplementedError(kind)


def _mark_jobs(schema: Schema) -> None:
    """Jobs are put together from encoded parts, so their type does not say what they are; their name does."""
    job = {"$ref": _REF.format(name="Job")}
    properties = schema["properties"]
    if "job" in properties:
        properties["job"] = {"anyOf": [job, {"type": "null"}]} if "anyOf" in properties["job"] else job
    if "jobs" in properties:
        properties["jobs"] = {"type": "array", "items": job}


# -- operations --------------------------------------------------------------------------------------------------------


def _operation(spec: Spec, route: Route, schemas: dict[str, Schema]) -> Schema:
    lines = source.cleandoc(spec.type.__doc__ or "").split("\n\n", 1)
    operation: Schema = {
        "operationId": spec.name if route == spec.routes[0] else f"{spec.name}Of{route.path.count('/')}",
        "summary": " ".join(lines[0].split()),
        "description": " ".join(lines[1].split()) if len(lines) > 1 else "",
        "tags": [spec.category],
        "parameters": [*_path_parameters(spec, route, schemas), *_query_parameters(spec, route, schemas)],
        "responses": _responses(spec, route),
    }
    body = _body(spec, route, schemas)
    if body is not None:
        operation["requestBody"] = body
    if spec.errors:
        operation["x-errors"] = list(spec.errors)
    if route.path in HEALTH_PATHS:
        operation["security"] = []
    return operation


def _own_fields(spec: Spec, route: Route) -> list[inspect.Field]:
    info = inspect.type_info(spec.type)
    assert isinstance(info, inspect.StructType)
    in_path = set(_PARAMETER.findall(route.path))
    return [field for field in info.fields if field.name != "req_id" and field.encode_name not in in_path]


def _path_parameters(spec: Spec, route: Route, schemas: dict[str, Schema]) -> list[Schema]:
    properties = schemas[spec.type.__name__]["properties"]
    return [
        {"name": name, "in": "path", "required": True, "schema": _not_empty(properties[name])}
        for name in _PARAMETER.findall(route.path)
    ]


def _not_empty(schema: Schema) -> Schema:
    """A part of a path has at least one character."""
    members = [member for member in schema.get("anyOf", [schema]) if member.get("type") != "null"]
    return {"minLength": 1, **members[0]}


def _query_parameters(spec: Spec, route: Route, schemas: dict[str, Schema]) -> list[Schema]:
    if route.method not in ("GET", "DELETE"):
        return []
    properties = schemas[spec.type.__name__]["properties"]
    shown = []
    for field in _own_fields(spec, route):
        if any(isinstance(member, inspect.StructType) for member in members_of(field.type)):
            continue
        schema = dict(properties[field.encode_name])
        if field.encode_name in route.defaults:
            schema["default"] = route.defaults[field.encode_name]
        shown.append({"name": field.encode_name, "in": "query", "required": field.required, "schema": schema})
    return shown


def _body(spec: Spec, route: Route, schemas: dict[str, Schema]) -> Schema | None:
    if route.method not in ("POST", "PUT"):
        return None
    fields = _own_fields(spec, route)
    properties = {name: schemas[spec.type.__name__]["properties"][name] for name in (f.encode_name for f in fields)}
    properties |= {alias: properties[field] for alias, field in route.aliases.items() if field in properties}
    # With an alias either name will do, which plain `required` cannot say.
    required = [f.encode_name for f in fields if f.required and f.encode_name not in route.aliases.values()]
    schema: Schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if route.whole is not None:
        schema = {"anyOf": [schema, properties[route.whole]]}
    return {"required": bool(required), "content": {"application/json": {"schema": schema}}}


def _responses(spec: Spec, route: Route) -> Schema:
    shown: Schema = {status: _error(text) for status, text in _ALWAYS.items()}
    if not spec.flags & Flag.WRITE and route.method == "GET":
        del shown["413"]
    for status in {"404", "409"} if route.fail is None else {str(route.fail)} - {"200"}:
        shown[status] = _error("It is not there" if status == "404" else "It cannot be done")
    shown["200"] = {"description": "Done", "content": _success(spec, route)}
    return dict(sorted(shown.items()))


def _error(text: str) -> Schema:
    content = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    return {"description": text, "content": content}


def _success(spec: Spec, route: Route) -> Schema:
    reply: Schema = {"$ref": _REF.format(name=spec.reply.__name__)}
    if route.lift:
        lifted = _lifted(spec.reply, route.lift)
        if isinstance(lifted, inspect.StrType):
            return {"text/plain": {"schema": {"type": "string"}}}
        reply = _schema_of(lifted)
    if route.fail == 200:
        reply = {"anyOf": [reply, {"$ref": _REF.format(name="Error")}]}
    return {"application/json": {"schema": reply}}


def _lifted(reply: type, path: tuple[str, ...]) -> inspect.Type:
    kind: inspect.Type = inspect.type_info(reply)
    for name in path:
        assert isinstance(kind, inspect.StructType)
        kind = members_of(next(field.type for field in kind.fields if field.encode_name == name))[0]
    return kind


def _schema_of(kind: inspect.Type) -> Schema:
    if isinstance(kind, inspect.ListType):
        return {"type": "array", "items": _schema_of(members_of(kind.item_type)[0])}
    assert isinstance(kind, inspect.StructType)
    return {"$ref": _REF.format(name=kind.cls.__name__)}


# -- what is no command ------------------------------------------------------------------------------------------------


def _plain_paths() -> dict[str, Schema]:
    return {
        "/healthz": {"get": _text("Whether the process answers.", "text/plain", "Monitoring")},
        "/live": {"get": _text("Whether the process answers.", "text/plain", "Monitoring")},
    }


def _text(summary: str, content_type: str, tag: str) -> Schema:
    return {
        "summary": summary,
        "tags": [tag],
        "security": [],
        "responses": {"200": {"description": "Done", "content": {content_type: {"schema": {"type": "string"}}}}},
    }
