"""Conditions on a machine's attributes: ``pool == a``, ``disk in ssd,nvme``, ``kernel != 5.4``, ``nvlink exists``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attrs import field

from fray.errors import InvalidRequest
from fray.model.frozen import frozen

OPERATORS = ("==", "!=", "in", "exists")
_DEFAULTS = {"preemptible": "false"}
"""Values of attributes that a machine does not name."""
_TEXT = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(?:(==|!=)|\s(in|exists)\b)\s*(.*?)\s*\Z")
_KEY = re.compile(r"[A-Za-z_][\w./-]*\Z")
HOW = "write 'pool == a', 'kernel != 5.4', 'disk in ssd,nvme' or 'nvlink exists'"


def _texts(values: str | Sequence[str]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values)


@frozen
class Constraint:
    """One condition on an attribute of a machine. Values are compared as strings, case-sensitive.

    Attributes:
        key: name of the attribute.
        op: ``==`` and ``!=`` with one value, ``in`` with one or more, ``exists`` with none. A machine without the
            attribute meets ``!=`` and nothing else.
        values: one, or several.

    Raises:
        InvalidRequest: an unknown operator, an invalid attribute name, or a wrong number of values for the operator.
    """

    key: str
    op: str = "exists"
    values: tuple[str, ...] = field(default=(), converter=_texts)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.key, str) or not _KEY.match(self.key):
            raise InvalidRequest(f"constraint on {self.key!r}: not a valid attribute name; {HOW}")
        if self.op not in OPERATORS:
            raise InvalidRequest(f"constraint on {self.key!r}: there is no operator {self.op!r}; {HOW}")
        if not all(isinstance(value, str) and value for value in self.values):
            raise InvalidRequest(f"constraint {self.key} {self.op} {self.values!r}: values must be strings; {HOW}")
        count = len(self.values)
        if not {"exists": count == 0, "in": count > 0}.get(self.op, count == 1):
            wanted = {"exists": "no value", "in": "one value or more"}.get(self.op, "one value")
            raise InvalidRequest(f"constraint {self.key} {self.op!r} has {wanted}, not {list(self.values)}; {HOW}")

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Return the constraint written as ``"disk in ssd,nvme"``.

        Raises:
            InvalidRequest: invalid syntax.
        """
        match = _TEXT.match(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidRequest(f"constraint {text!r}: invalid syntax; {HOW}")
        key, op, values = match[1], match[2] or match[3], match[4]
        if op == "in":
            return cls(key, op, tuple(value.strip() for value in values.split(",")))
        return cls(key, op, (values,) if values else ())

    def meets(self, attributes: Mapping[str, str]) -> bool:
        """Return whether a machine with these attributes satisfies the constraint."""
        have = attributes.get(self.key, "") or _DEFAULTS.get(self.key, "")
        if self.op == "exists":
            return bool(have)
        return (have in self.values) is (self.op != "!=")

    def __str__(self) -> str:
        return f"{self.key} {self.op} {','.join(self.values)}".rstrip()


def parse_constraints(given: str | Constraint | Sequence[str | Constraint] | None) -> tuple[Constraint, ...]:
    """Return the constraints a user gave: one or several, as strings or `Constraint`.

    Raises:
        InvalidRequest: invalid syntax.
    """
    several = () if given is None else (given,) if isinstance(given, str | Constraint) else tuple(given)
    return tuple(each if isinstance(each, Constraint) else Constraint.parse(each) for each in several)
