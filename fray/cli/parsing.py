"""Argument parser of the command line, and the options that all verbs have. Only argparse is imported here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line that says where help is."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse arguments; report unknown options on behalf of the verb's parser, with similar options.

        A verb may have set ``more``, the name of its last positional argument, which takes any number: argparse takes
        those before the next option alone.
        """
        options, unknown = self.parse_known_args(args, namespace)
        if (name := getattr(options, "more", None)) and not any(one.startswith("-") for one in unknown):
            setattr(options, name, [*getattr(options, name), *unknown])
            return options
        if unknown:
            getattr(options, "parser", self).refuse(unknown)
        return options

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        from difflib import get_close_matches

        near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=2)
        what = "option" if unknown[0].startswith("-") else "argument"
        self.error(f"unknown {what} {unknown[0]!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))


Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


def verb(verbs: Verbs, name: str, runs: str, text: str, example: str, *, opens: str = "tool") -> Parser:
    parser = verbs.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"examples:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(verb=runs, opens=opens, parser=parser)
    add_common(parser, default=argparse.SUPPRESS)
    if text.startswith("list "):
        add_watch(parser)
    return parser


def add_common(parser: Parser, **default: Any) -> None:
    """Add the options of all verbs, which may be written before the verb, too.

    Args:
        default: of the whole command none; of a verb ``argparse.SUPPRESS``, which leaves those of the command.
    """
    where = parser.add_argument_group("cluster")
    where.add_argument("--cluster", metavar="SPEC", help="fray://host:port (default: FRAY_CLUSTER_SPEC)", **default)
    where.add_argument(
        "--token-file", metavar="FILE", help="file with the cluster's token (default: FRAY_TOKEN)", **default
    )
    where.add_argument(
        "--namespace", metavar="NS", help="namespace of names (default: FRAY_NAMESPACE, else all)", **default
    )
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys", **default)
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        help="colors: on a terminal, unless NO_COLOR is set (default: auto)",
        **default,
    )


def add_watch(parser: Parser) -> None:
    """Add ``--watch``, which every verb that lists something has."""
    parser.add_argument("--watch", "-w", action="store_true", help="print the list again every 2 s, until Ctrl-C")


def verb_group(verbs: Verbs, name: str, text: str, example: str = "") -> Verbs:
    """Add a verb that only has verbs below it, and return where those are added."""
    parser = verbs.add_parser(
        name,
        help=text,
        epilog=f"examples:\n{example}" if example else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser.add_subparsers(metavar="VERB", required=True, parser_class=Parser)


def one_job(parser: Parser, many: bool = False) -> None:
    if many:
        parser.add_argument("jobs", nargs="*", metavar="JOB", help="id or name")
    else:
        parser.add_argument("job", metavar="JOB", help="id or name")
