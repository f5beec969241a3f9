"""Settings of a file or a program into typed classes, with the path of each key that is wrong."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from attrs import NOTHING, field, fields, frozen, has, make_class
from cattrs import ClassValidationError, Converter, ForbiddenExtraKeysError, IterableValidationError

from fray.errors import InvalidRequest
from fray.model.text import near_text

T = TypeVar("T")


@frozen
class AtLeast:
    """Lower limit of a number: ``Annotated[int, AtLeast(1)]``."""

    limit: float


def structure(value: object, kind: type[T], source: str, prefix: str = "") -> T:
    """Return ``value`` as an object of the attrs class ``kind``.

    Args:
        source: what is read, for the message: ``"recipe train.yaml"``.
        prefix: path of the value in it.

    Raises:
        InvalidRequest: unknown keys, missing ones, or values of another type; the message has a line for each, with
            its path, what was found, what was expected, and the nearest name.
    """
    try:
        return _CONVERTER.structure(value, kind)
    except (ClassValidationError, IterableValidationError, ValueError, TypeError) as error:
        raise invalid(source, _problems(error, prefix)) from None


def check_arguments(given: object, source: str) -> None:
    """Check the arguments of an object of an attrs class whose types are plain, as those of a recipe.

    Raises:
        InvalidRequest: values of another type; the message has a line for each, as that of `structure`.
    """
    kind: Any = type(given)
    names = [one.name for one in fields(kind) if one.init]
    structure({name: getattr(given, name) for name in names}, plain_class(kind), source)


@cache
def plain_class(kind: Any, without: tuple[str, ...] = ()) -> type[Any]:
    """Return a class with the arguments of ``kind`` whose types are plain; others are taken as they are.

    Args:
        kind: an attrs class.
        without: arguments that it does not have.
    """
    hints = get_type_hints(kind, include_extras=True)
    members = {
        one.name: field(
            default=NOTHING if one.default is NOTHING else None,
            type=hints[one.name] if is_plain(hints[one.name]) else Any,
        )
        for one in fields(kind)
        if one.init and one.name not in without
    }
    return make_class(kind.__name__, members, kw_only=True)


def invalid(source: str, problems: Iterable[tuple[str, str]]) -> InvalidRequest:
    """Return the error for problems, each a path and what is wrong there."""
    lines = [f"{path}: {text}" if path else text for path, text in problems]
    if len(lines) == 1:
        return InvalidRequest(f"invalid {source}: {lines[0]}")
    return InvalidRequest("\n  ".join([f"invalid {source}: {len(lines)} errors", *lines]))


def expected_one_of(found: object, names: Iterable[object]) -> str:
    """Return what is wrong with a value that is not among ``names``."""
    names = list(names)
    listed = ", ".join(repr(name) for name in names)
    return f"found {found!r}; expected one of {listed}{near_text(str(found), map(str, names))}"


def is_plain(kind: Any) -> bool:
    """Return whether values of a type are checked here; others are for the class that takes them."""
    if _is_optional(kind):
        return is_plain(next(one for one in get_args(kind) if one is not type(None)))
    origins = (Literal, tuple, Sequence, Mapping, dict)
    return kind in (bool, int, float, str) or get_origin(kind) in origins or _is_limited(kind)


def _problems(error: BaseException, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(error, ForbiddenExtraKeysError):
        names = [attribute.name for attribute in fields(error.cl) if attribute.init]
        for key in sorted(error.extra_fields, key=str):
            near = near_text(str(key), names)
            text = f"unknown key{near or '; the keys here are ' + ', '.join(names)}"
            yield _join(path, str(key)), text
    elif isinstance(error, ClassValidationError):
        noted, others = error.group_exceptions()
        for one, note in noted:
            yield from _problems(one, _join(path, note.name))
        for other in others:
            yield from _problems(other, path)
    elif isinstance(error, IterableValidationError):
        of_items, others = error.group_exceptions()
        for one, at in of_items:
            yield from _problems(one, f"{path}[{at.index}]")
        for other in others:
            yield from _problems(other, path)
    elif isinstance(error, _AtKeyError):
        yield from _problems(error.error, _join(path, error.key))
    elif isinstance(error, KeyError):
        yield path, "missing; it has no default"
    else:
        yield path, str(error)


class _AtKeyError(ValueError):
    """Error of the value of one key of a mapping."""

    def __init__(self, key: str, error: ValueError) -> None:
        self.key, self.error = key, error


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _exactly(expected: str, is_valid: Callable[[object], bool]) -> Callable[[object, object], Any]:
    def hook(value: object, _: object) -> Any:
        if not is_valid(value):
            raise ValueError(_mismatch(value, expected))
        return value

    return hook


def _mismatch(value: object, expected: str) -> str:
    return f"found {_shown(value)}; expected {expected}"


def _shown(value: object) -> str:
    if isinstance(value, Mapping | list | tuple):
        return f"a {'mapping' if isinstance(value, Mapping) else 'list'}"
    return "nothing" if value is None else f"{value!r} ({type(value).__name__})"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_limited(kind: Any) -> bool:
    return get_origin(kind) is Annotated and any(isinstance(one, AtLeast) for one in kind.__metadata__)


def _read_literal(value: object, kind: object) -> object:
    names = get_args(kind)
    if not any(value == name and type(value) is type(name) for name in names):
        raise ValueError(expected_one_of(value, names))
    return value


def _read_limited(value: object, kind: Any) -> object:
    limit = next(one.limit for one in kind.__metadata__ if isinstance(one, AtLeast))
    number = _CONVERTER.structure(value, kind.__origin__)
    if not number >= limit:
        raise ValueError(f"found {value!r}; expected {limit} or more")
    return number


def _read_class(kind: Any) -> Callable[[object, object], Any]:
    """Return the reader of a class. A class with ``own_keys`` says which unknown keys it keeps, in ``own``."""
    read = _CONVERTER.gen_structure_attrs_fromdict(kind)

    def hook(value: object, _: object) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(_mismatch(value, "a mapping"))
        take_own: Callable[[Mapping[str, Any]], dict[str, Any]] | None = getattr(kind, "own_keys", None)
        own = take_own(value) if take_own is not None else {}
        made = read({key: each for key, each in value.items() if key not in own}, kind)
        if own:
            made.own = own
        return made

    return hook


def _read_sequence(value: object, kind: Any) -> Any:
    """Read a ``tuple[X, ...]``; one value that is not a list stands for a list of it."""
    if value is None or isinstance(value, Mapping):
        raise ValueError(_mismatch(value, "a list"))
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_CONVERTER.structure(list(items), list[get_args(kind)[0]]))  # type: ignore[misc,arg-type]


def _read_list(value: object, kind: Any) -> Any:
    """Read a ``Sequence[X]``. Refuse a text, whose items would be its letters."""
    if not isinstance(value, list | tuple):
        raise ValueError(_mismatch(value, "a list"))
    _CONVERTER.structure(list(value), list[get_args(kind)[0]])  # type: ignore[misc,arg-type]
    return value


def _read_mapping(value: object, kind: Any) -> Any:
    """Read a ``Mapping[str, X]``; values are checked if their type is plain."""
    if not isinstance(value, Mapping):
        raise ValueError(_mismatch(value, "a mapping"))
    of_values = get_args(kind)[1]
    for key, each in value.items() if is_plain(of_values) else ():
        try:
            _CONVERTER.structure(each, of_values)
        except ValueError as error:
            raise _AtKeyError(str(key), error) from None
    return value


def _is_kind(*origins: Any) -> Callable[[Any], bool]:
    return lambda kind: get_origin(kind) in origins


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind) and len(get_args(kind)) == 2


def _read_optional(value: object, kind: Any) -> Any:
    inner = next(one for one in get_args(kind) if one is not type(None))
    return None if value is None else _CONVERTER.structure(value, inner)


_CONVERTER = Converter(detailed_validation=True, forbid_extra_keys=True)
_CONVERTER.register_structure_hook(bool, _exactly("true or false", lambda value: isinstance(value, bool)))
_CONVERTER.register_structure_hook(int, _exactly("a whole number", _is_whole))
_CONVERTER.register_structure_hook(float, _exactly("a number", _is_number))
_CONVERTER.register_structure_hook(str, _exactly("text", lambda value: isinstance(value, str)))
_CONVERTER.register_structure_hook_factory(has, _read_class)
_CONVERTER.register_structure_hook_func(_is_kind(Literal), _read_literal)
_CONVERTER.register_structure_hook_func(_is_optional, _read_optional)
_CONVERTER.register_structure_hook_func(_is_limited, _read_limited)
_CONVERTER.register_structure_hook_func(_is_kind(tuple), _read_sequence)
_CONVERTER.register_structure_hook_func(_is_kind(Sequence), _read_list)
_CONVERTER.register_structure_hook_func(_is_kind(Mapping, dict), _read_mapping)
