"""Schema of everything that another build may read: messages, frames, flags of calls, rows of the store; and its rules.

``python -m tests.upgrade.wire_schema TREE`` prints the schema of the build in a directory, as JSON. The one of the
previous release is in ``wire_schema.json``; `problems` compares it with that of this build.
"""

from __future__ import annotations

import ast
import json
import struct
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import attrs

SNAPSHOT = Path(__file__).parent / "wire_schema.json"
RULES = "see CONTRIBUTING.md, Compatibility between releases"


# The schema of a build -----------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """Return the schema of the build that is imported as `fray`."""
    # Here, and not above: the directory of another build may have been put in front.
    import fray
    from fray.controller import store
    from fray.net import auth, codec
    from fray.net.transports import http_upgrade
    from fray.runtime.calls import wire
    from fray.scheduler.state.rows import TABLES

    types: dict[str, Any] = {}
    messages = {name: _add(cls, types) for name, cls in sorted(codec.MESSAGES.items())}
    rows = {table: _add(cls, types) for table, cls in sorted(TABLES.items())}
    numbers = {name: value for name, value in vars(wire).items() if name.isupper() and isinstance(value, int)}
    return {
        "wire_versions": _wire_versions(),
        "capabilities": {name: sorted(guarded) for name, guarded in _capabilities().items()},
        "frames": {
            "header": codec.HEADER.format,
            "acknowledgement": codec.ACK.format,
            "kinds": {kind.name: kind.value for kind in codec.Kind},
            "flags": {"MORE": codec.MORE, "META": codec.META},
            "handshake": {
                **{name: getattr(auth, name) for name in ("SCHEME", "DIAL", "LISTEN")},
                **{name: getattr(http_upgrade, name) for name in ("RESOURCE", "CHALLENGE", "PROOF")},
            },
        },
        "calls": {
            **{
                name: value
                for name, value in sorted(numbers.items())
                if not name.endswith(("_LIMIT", "_BYTES", "_CALLS"))
            },
            **{name: value.format for name, value in sorted(vars(wire).items()) if isinstance(value, struct.Struct)},
        },
        "messages": messages,
        "pickled": sorted(set(_pickled(Path(fray.__file__).parent))),
        "store": {"version": store.SCHEMA_VERSION, "rows": rows},
        "types": dict(sorted(types.items())),
    }


def _wire_versions() -> list[int]:
    try:
        from fray.net.channel.versions import WIRE_VERSIONS
    except ImportError:
        return [1, 1]
    return list(WIRE_VERSIONS)


def _capabilities() -> dict[str, tuple[str, ...]]:
    try:
        from fray.net.channel.versions import CAPABILITIES
    except ImportError:
        return {}
    return dict(CAPABILITIES)


def _add(kind: Any, types: dict[str, Any]) -> str:
    """Return the name of a type, after entering the classes and enumerations of which it consists."""
    if isinstance(kind, NewType):
        return _add(kind.__supertype__, types)
    if kind in (None, NoneType):
        return "None"
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " | ".join(sorted(_add(each, types) for each in args))
    if origin is not None:
        inner = ", ".join("..." if each is ... else _add(each, types) for each in args)
        return f"{getattr(origin, '__name__', str(origin))}[{inner}]"
    if not isinstance(kind, type):
        return str(kind)
    if kind.__name__ not in types and issubclass(kind, Enum):
        types[kind.__name__] = sorted(str(each.value) for each in kind)
    elif kind.__name__ not in types and attrs.has(kind):
        types[kind.__name__] = {}
        hints = get_type_hints(kind)
        types[kind.__name__] = {
            each.name: f"{_add(hints[each.name], types)}{_default(each)}" for each in attrs.fields(kind)
        }
    return kind.__name__


def _default(field: Any) -> str:
    """Return `` = `` and the default as JSON; empty if the field is required."""
    from fray.net.codec import to_json

    if field.default is attrs.NOTHING:
        return ""
    value = field.default.factory() if hasattr(field.default, "factory") else field.default
    return f" = {to_json(value)}"


def _pickled(package: Path) -> Iterator[str]:
    """Yield what pickles name: errors, classes with a `__reduce__`, and the functions that it names."""
    for file in package.rglob("*.py"):
        text = file.read_text()
        module = ".".join(["fray", *file.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")
        if module == "fray.errors":
            yield from (f"{module}:{each.name}" for each in ast.parse(text).body if isinstance(each, ast.ClassDef))
        if "def __reduce__" not in text or module.startswith(("fray.v2.ray_backend", "fray.v2.iris")):
            continue
        tree = ast.parse(text)
        imported = {
            name.asname or name.name: f"{each.module}:{name.name}"
            for each in tree.body
            if isinstance(each, ast.ImportFrom)
            for name in each.names
        }
        for cls in (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)):
            for method in cls.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__reduce__" and _returns(method):
                    yield f"{module}:{cls.name}"
                    for each in ast.walk(method):
                        if isinstance(each, ast.Return) and isinstance(each.value, ast.Tuple):
                            first = each.value.elts[0]
                            if isinstance(first, ast.Name):
                                yield imported.get(first.id, f"{module}:{first.id}")


def _returns(method: ast.FunctionDef) -> bool:
    return method.returns is None or ast.unparse(method.returns) != "NoReturn"


# The rules -----------------------------------------------------------------------------------------------------------


def problems(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield what keeps processes of two builds from working together, each with what to do."""
    guarded = {what for names in new["capabilities"].values() for what in names}
    yield from _version_problems(old, new)
    for part, number in (("frames", "the handshake and all frames"), ("calls", "calls")):
        for name, value in old[part].items():
            found = new[part].get(name)
            kept = found == value if not isinstance(value, dict) else value.items() <= (found or {}).items()
            if not kept:
                yield f"{part}: {name} was {value} and is {found}: it is part of {number} and never changes; {RULES}"
    for name in sorted(new["frames"]["kinds"].keys() - old["frames"]["kinds"].keys()):
        if f"Kind.{name}" not in guarded:
            yield _unguarded(f"Kind.{name}", "frame")
    # Of the oldest version that this build speaks, everything must still be there.
    if new["wire_versions"][0] <= old["wire_versions"][1]:
        for name in sorted(old["messages"].keys() - new["messages"].keys()):
            yield f"message {name} was removed or renamed: {_kept()}"
    for name in sorted(set(old["pickled"]) - set(new["pickled"])):
        yield f"{name} was removed, renamed or moved: pickles of the previous release name it. Keep that name; {RULES}"
    for name in sorted(new["messages"].keys() - old["messages"].keys()):
        if name not in guarded:
            yield _unguarded(name, "message")
    for name in sorted(old["types"].keys() & new["types"].keys()):
        yield from _type_problems(name, old["types"][name], new["types"][name], guarded)
    yield from _store_problems(old, new)


def _version_problems(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    (_, before), (oldest, newest) = old["wire_versions"], new["wire_versions"]
    if not oldest <= before <= newest:
        yield (
            f"WIRE_VERSIONS is {oldest} to {newest} and the previous release speaks up to {before}: neighbouring "
            f"releases must have one in common; {RULES}"
        )
    for name in sorted(old["capabilities"].keys() - new["capabilities"].keys()):
        yield f"capability {name!r} was removed: the previous release would stop using it; {RULES}"


def _type_problems(name: str, old: Any, new: Any, guarded: set[str]) -> Iterator[str]:
    if isinstance(old, list) or isinstance(new, list):
        if not (isinstance(old, list) and isinstance(new, list)):
            yield f"{name} is an enumeration in one release and a class in the other: use another name"
            return
        for value in sorted(set(old) - set(new)):
            yield f"value {value!r} of {name} was removed: {_kept()}"
        for value in sorted(set(new) - set(old)):
            if f"{name}.{value}" not in guarded:
                yield _unguarded(f"{name}.{value}", "value")
        return
    for field, before in old.items():
        if field not in new:
            yield f"field {name}.{field} was removed or renamed: {_kept()}"
            continue
        (kind, _, default), (kind_now, _, default_now) = before.partition(" = "), new[field].partition(" = ")
        if kind != kind_now:
            yield (
                f"field {name}.{field} was {kind} and is {kind_now}: add another field with a default and keep this "
                f"one; {RULES}"
            )
        elif default != default_now:
            yield (
                f"default of {name}.{field} was {default or 'none'} and is {default_now or 'none'}: a peer that leaves "
                f"the field out means the former; {RULES}"
            )
    for field, after in new.items():
        if field not in old and " = " not in after:
            yield (
                f"field {name}.{field} is new and has no default: the previous release does not send it. Give it the "
                f"default that means what that release does; {RULES}"
            )


def _store_problems(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    changed = [table for table in old["store"]["rows"] if _reachable(old, table) != _reachable(new, table)]
    changed += sorted(new["store"]["rows"].keys() - old["store"]["rows"].keys())
    if changed and new["store"]["version"] <= old["store"]["version"]:
        yield (
            f"rows of the store have changed ({', '.join(changed)}): raise SCHEMA_VERSION in fray/controller/store.py "
            f"and add a step to MIGRATIONS, so that the previous release refuses the store; {RULES}"
        )


def _reachable(schema: dict[str, Any], table: str) -> dict[str, Any]:
    """Return the types of which the rows of a table consist."""
    found: dict[str, Any] = {}
    names = [schema["store"]["rows"].get(table, "")]
    while names:
        text = names.pop()
        for name in schema["types"].keys() - found.keys():
            if name in text.replace("[", " ").replace("]", " ").replace(",", " ").split():
                found[name] = schema["types"][name]
                if isinstance(found[name], dict):
                    names += [field.partition(" = ")[0] for field in found[name].values()]
    return found


def _kept() -> str:
    return f"the previous release sends or expects it. Keep it for one more release; {RULES}"


def _unguarded(what: str, kind: str) -> str:
    return (
        f"{kind} {what} is new: the previous release does not know it. Add {what!r} to a capability of CAPABILITIES in "
        f"fray/net/channel/versions.py; {RULES}"
    )


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    print(json.dumps(schema(), indent=1, sort_keys=True))
