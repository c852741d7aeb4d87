"""The OpenAPI description of the HTTP API, generated from the command registry: what is served is what is described.

Commands give their own part (fields, limits, replies, errors). What is no command (texts, pages, streams) is a line in
`_plain_paths`. Payloads are any JSON; a job is described by the views that it is encoded from.
"""

from __future__ import annotations

import inspect as source
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct, inspect

from headrace import __version__
from headrace.commands import REGISTRY, Flag, Route, Spec
from headrace.server.access import HEALTH_PATHS
from headrace.server.exchange import Request, Response
from headrace.server.routes import fields_of, fits_query, members_of
from headrace.server.schemas import Schema, Schemas
from headrace.views import HistoryView, LinksView, SettingsView

if TYPE_CHECKING:
    from headrace.server.httpsession import HttpSession

_REF: Final = "#/components/schemas/{name}"
_PARAMETER: Final = re.compile(r"{(\w+)}")
_ALWAYS: Final = {
    "400": "The request is not valid, or cannot be done",
    "401": "The token is missing or wrong",
    "403": "The Host or Origin is not allowed",
    "408": "The request took too long to come",
    "413": "The body or the reply exceeds 64 MB",
    "415": "The body is not JSON",
    "429": "Too many requests",
    "431": "Path and headers exceed 16 KB",
    "500": "An error of the server",
    "503": "The disk refuses, or there are too many connections",
}


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
            "schemas": dict(sorted(schemas.found.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


# -- schemas -----------------------------------------------------------------------------------------------------------


def _schemas(specs: list[Spec]) -> Schemas:
    schemas = Schemas()
    views = {"JobState": JobView, "JobSettings": SettingsView, "JobLinks": LinksView, "JobHistory": HistoryView}
    parts = [schemas.ref(view, f"{name}View") for name, view in views.items()]
    schemas.found["Job"] = {"description": "A job with its settings, links and history.", "allOf": parts}
    schemas.found["Error"] = {
        "type": "object",
        "properties": {"ok": {"const": False}, "error": {"type": "string"}},
        "required": ["ok", "error"],
    }
    for spec in specs:
        schemas.ref(spec.reply)
    for schema in list(schemas.found.values()):
        _mark_jobs(schema.get("properties", {}))
    return schemas


def _mark_jobs(properties: Schema) -> None:
    """Jobs are put together from encoded parts, so their type does not say what they are; their name does."""
    job = {"$ref": _REF.format(name="Job")}
    if properties.get("job") == {}:
        properties["job"] = job
    elif "job" in properties:
        properties["job"] = {"anyOf": [job, {"type": "null"}]}
    if properties.get("jobs", {}).get("items") == {}:
        properties["jobs"] = {"type": "array", "items": job}


# -- operations --------------------------------------------------------------------------------------------------------


def _operation(spec: Spec, route: Route, schemas: Schemas) -> Schema:
    lines = source.cleandoc(spec.type.__doc__ or "").split("\n\n", 1)
    operation: Schema = {
        "operationId": spec.name if route == spec.routes[0] else f"{spec.name}Of{route.path.count('/')}",
        "summary": " ".join(lines[0].split()),
        "description": " ".join(lines[1].split()) if len(lines) > 1 else "",
        "tags": [spec.category],
        "parameters": [*_path_parameters(spec, route, schemas), *_query_parameters(spec, route, schemas)],
        "responses": _responses(spec, route, schemas),
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


def _path_parameters(spec: Spec, route: Route, schemas: Schemas) -> list[Schema]:
    types = fields_of(spec.type)
    return [
        {"name": name, "in": "path", "required": True, "schema": {"minLength": 1, **_not_null(schemas.of(types[name]))}}
        for name in _PARAMETER.findall(route.path)
    ]


def _query_parameters(spec: Spec, route: Route, schemas: Schemas) -> list[Schema]:
    if route.method not in ("GET", "DELETE"):
        return []
    shown = []
    for field in _own_fields(spec, route):
        if not fits_query(field.type):
            continue
        schema = _not_null(schemas.field(field))
        if field.encode_name in route.defaults:
            schema["default"] = route.defaults[field.encode_name]
        shown.append({"name": field.encode_name, "in": "query", "required": field.required, "schema": schema})
    return shown


def _not_null(schema: Schema) -> Schema:
    """In a path or a query there is no null: a parameter is there or not."""
    members = [member for member in schema.get("anyOf", ()) if member != {"type": "null"}]
    if len(members) == 1:
        return {**{name: value for name, value in schema.items() if name != "anyOf"}, **members[0]}
    return {**schema, "anyOf": members} if members else dict(schema)


def _body(spec: Spec, route: Route, schemas: Schemas) -> Schema | None:
    if route.method not in ("POST", "PUT"):
        return None
    fields = _own_fields(spec, route)
    properties = {field.encode_name: schemas.field(field) for field in fields}
    properties |= {alias: properties[field] for alias, field in route.aliases.items() if field in properties}
    # With an alias either name will do, which plain `required` cannot say.
    required = [f.encode_name for f in fields if f.required and f.encode_name not in route.aliases.values()]
    schema: Schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if route.whole is not None:
        schema = {"anyOf": [schema, properties[route.whole]]}
    return {"required": bool(required), "content": {"application/json": {"schema": schema}}}


def _responses(spec: Spec, route: Route, schemas: Schemas) -> Schema:
    shown: Schema = {status: _error(text) for status, text in _ALWAYS.items()}
    if not spec.flags & Flag.WRITE and route.method == "GET":
        del shown["413"]
    for status in {"404", "409"} if route.fail is None else {str(route.fail)} - {"200"}:
        shown[status] = _error("It is not there" if status == "404" else "It cannot be done")
    shown["200"] = {"description": "Done", "content": _success(spec, route, schemas)}
    return dict(sorted(shown.items()))


def _error(text: str) -> Schema:
    content = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    return {"description": text, "content": content}


def _success(spec: Spec, route: Route, schemas: Schemas) -> Schema:
    reply = schemas.ref(spec.reply)
    if route.lift:
        lifted = _lifted(spec.reply, route.lift)
        if isinstance(lifted, inspect.StrType):
            return {"text/plain": {"schema": {"type": "string"}}}
        reply = schemas.of(lifted)
    if route.fail == 200:
        reply = {"anyOf": [reply, {"$ref": _REF.format(name="Error")}]}
    return {"application/json": {"schema": reply}}


def _lifted(reply: type, path: tuple[str, ...]) -> inspect.Type:
    kind: inspect.Type = inspect.type_info(reply)
    for name in path:
        assert isinstance(kind, inspect.StructType)
        kind = members_of(next(field.type for field in kind.fields if field.encode_name == name))[0]
    return kind


# -- what is no command ------------------------------------------------------------------------------------------------


def _plain_paths() -> dict[str, Schema]:
    alive = "Whether the process answers."
    return {
        "/healthz": {"get": _text("Alive", alive, "text/plain", "Monitoring")},
        "/live": {"get": _text("Live", alive, "text/plain", "Monitoring")},
        **_streams("/events", "Events", "Events as they happen, as server-sent events.", "200", "text/event-stream"),
        **_streams("/ws", "WebSocket", "Commands and events over a WebSocket.", "101", None),
    }


def _text(name: str, summary: str, content_type: str, tag: str) -> Schema:
    return {
        "operationId": name,
        "summary": summary,
        "tags": [tag],
        "security": [],
        "responses": {"200": {"description": "Done", "content": {content_type: {"schema": {"type": "string"}}}}},
    }


def _streams(path: str, name: str, summary: str, status: str, content_type: str | None) -> dict[str, Schema]:
    """A stream of all queues and one of a single queue."""
    began: Schema = {"description": "The stream begins"}
    if content_type is not None:
        began["content"] = {content_type: {"schema": {"type": "string"}}}
    refused = {code: _error(_ALWAYS[code]) for code in ("400", "401", "403", "503")}
    common: Schema = {"summary": summary, "tags": ["Events"], "responses": {status: began, **refused}}
    queue = {"name": "queue", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        path: {"get": {"operationId": name, **common}},
        f"{path}/queues/{{queue}}": {"get": {"operationId": f"{name}OfQueue", "parameters": [queue], **common}},
    }
