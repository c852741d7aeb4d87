"""JSON schemas of commands and replies, read off their types.

msgspec can make schemas too, but not of structs that hold encoded payloads (`Raw`), and ours all do.
"""

from __future__ import annotations

import inspect as source
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import NODEFAULT, UNSET, Raw, inspect

Schema = dict[str, Any]


class Schemas:
    """Collects the schemas of all objects that were asked for, by name."""

    def __init__(self) -> None:
        self.found: dict[str, Schema] = {}
        self._names: dict[type, str] = {}

    def ref(self, struct: type, name: str | None = None) -> Schema:
        """A reference to the schema of a struct, which is made when it is new."""
        if struct not in self._names:
            name = name or struct.__name__
            if name in self.found:
                raise ValueError(f"two objects are called {name}")
            self._names[struct] = name
            self.found[name] = {}  # an object may contain itself
            self.found[name] = self._object(struct)
        return {"$ref": f"#/components/schemas/{self._names[struct]}"}

    def _object(self, struct: type) -> Schema:
        info = inspect.type_info(struct)
        assert isinstance(info, inspect.StructType)
        fields = [field for field in info.fields if field.name != "req_id"]
        schema: Schema = {
            "type": "object",
            "properties": {field.encode_name: self.field(field) for field in fields},
            "required": [field.encode_name for field in fields if field.required],
        }
        own = struct.__dict__.get("__doc__")
        if own:
            schema["description"] = " ".join(source.cleandoc(own).split())
        return schema

    def field(self, field: inspect.Field) -> Schema:
        schema = self.of(field.type)
        default = field.default
        if default in (NODEFAULT, UNSET, None, ()) or isinstance(default, Raw):
            return schema
        return {**schema, "default": msgspec.to_builtins(default)}

    def of(self, kind: inspect.Type) -> Schema:
        while isinstance(kind, inspect.Metadata):
            if (kind.extra or {}).get("nullable"):
                return {"anyOf": [self.of(kind.type), {"type": "null"}]}
            kind = kind.type
        made = _RULES[type(kind)](self, kind)
        return {name: value for name, value in made.items() if value is not None}


def _number(word: str) -> Callable[[Schemas, Any], Schema]:
    return lambda _, kind: {"type": word, "minimum": kind.ge, "maximum": kind.le, "exclusiveMinimum": kind.gt}


def _text(_: Schemas, kind: Any) -> Schema:
    # Python's $ matches before a last line break, which the lookahead behind it undoes; JavaScript's does not.
    pattern = kind.pattern.replace(r"$(?!\n)", "$") if kind.pattern else None
    return {"type": "string", "minLength": kind.min_length, "maxLength": kind.max_length, "pattern": pattern}


def _list(schemas: Schemas, kind: Any) -> Schema:
    items = schemas.of(kind.item_type)
    return {"type": "array", "items": items, "minItems": kind.min_length, "maxItems": kind.max_length}


_RULES: Final[dict[type, Callable[[Schemas, Any], Schema]]] = {
    inspect.IntType: _number("integer"),
    inspect.FloatType: _number("number"),
    inspect.StrType: _text,
    inspect.BoolType: lambda _, kind: {"type": "boolean"},
    inspect.NoneType: lambda _, kind: {"type": "null"},
    inspect.RawType: lambda _, kind: {},
    inspect.AnyType: lambda _, kind: {},
    inspect.EnumType: lambda _, kind: {"enum": [member.value for member in kind.cls]},
    inspect.LiteralType: lambda _, kind: {"enum": list(kind.values)},
    inspect.ListType: _list,
    inspect.VarTupleType: _list,
    inspect.DictType: lambda schemas, kind: {
        "type": "object",
        "additionalProperties": schemas.of(kind.value_type),
    },
    inspect.UnionType: lambda schemas, kind: {"anyOf": [schemas.of(member) for member in kind.types]},
    inspect.StructType: lambda schemas, kind: schemas.ref(kind.cls),
}
