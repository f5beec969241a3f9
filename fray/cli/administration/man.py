"""``fray man``: manual pages in the format of man(7), made of the parsers that print ``--help``."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fray import __version__
from fray.cli.options import parser_of
from fray.cli.output import note, say_json
from fray.errors import InvalidRequest

SECTIONS = {"positional arguments": "ARGUMENTS", "options": "OPTIONS"}
"""Names of sections in place of those of argparse."""


def man(options: argparse.Namespace) -> int:
    """Run ``fray man``. Raises InvalidRequest: the directory cannot be written."""
    pages, directory = manual_pages(), options.directory or _default_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise InvalidRequest(
            f"{directory} cannot be written: {error.strerror or error}; `fray man DIR` writes elsewhere"
        ) from None
    if options.json:
        say_json(sorted(pages))
    else:
        note(f"wrote {len(pages)} pages to {directory}; `man fray` finds those in a man1 of its MANPATH")
    return 0


def _default_directory() -> Path:
    """Return where man looks for the pages of a program in PATH: for ``X/bin/fray`` in ``X/share/man``."""
    found = shutil.which("fray")
    # Without following links, since programs of pipx and uv are links in a bin that is in PATH.
    prefix = Path(found).absolute().parent.parent if found is not None else Path(sys.prefix)
    return prefix / "share" / "man" / "man1"


def manual_pages() -> dict[str, str]:
    """Return the text of each page by the name of its file: ``fray-run.1``."""
    # Here, since they import the daemons.
    from fray.controller.options import make_parser as controller_parser
    from fray.node.main import make_parser as node_parser

    daemons = {parser.prog: parser for parser in (node_parser(), controller_parser())}
    pages = dict(_pages_below(parser_of(), "runs Python jobs and actors on a cluster", list(daemons)))
    # `fray node` only leads to `fray node show`, which has a page: the page of its name is that of the daemon.
    pages |= {name: _page(parser, parser.description or "", ["fray"]) for name, parser in daemons.items()}
    return {f"{name}.1": text for name, text in pages.items()}


def _pages_below(parser: argparse.ArgumentParser, about: str, see: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the page of a command, and those of the commands below it."""
    verbs = _verbs_of(parser)
    below = {each.dest: each.help for each in verbs._choices_actions} if verbs is not None else {}
    yield _page_name(parser), _page(parser, about, [_page_name(verbs.choices[name]) for name in below] + see)
    for name, text in below.items():
        yield from _pages_below(verbs.choices[name], text, [_page_name(parser)])


def _page_name(parser: argparse.ArgumentParser) -> str:
    return parser.prog.replace(" ", "-")


def _page(parser: argparse.ArgumentParser, about: str, see: list[str]) -> str:
    name = _page_name(parser)
    date = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))))
    lines = [f'.TH {_escaped(name.upper())} 1 {date} "fray {__version__}" "Fray"']
    lines += [".SH NAME", f"{_escaped(name)} \\- {_escaped(about.rstrip('.'))}"]
    lines += [".SH SYNOPSIS", *_synopsis(parser)]
    lines += [".SH DESCRIPTION", _escaped(" ".join((parser.description or f"{about}.").split()))]
    lines += _body(parser)
    lines += [".SH SEE ALSO", *(f".BR {_escaped(each)} (1)," for each in see[:-1]), f".BR {_escaped(see[-1])} (1)"]
    return "\n".join(lines) + "\n"


def _synopsis(parser: argparse.ArgumentParser) -> Iterator[str]:
    words = [_value(each) for each in parser._actions if not each.option_strings and each.help != argparse.SUPPRESS]
    yield f".B {_escaped(parser.prog)}"
    yield _escaped(" ".join(["[options]", *words]))


def _body(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield arguments, options, commands below, and the text after them."""
    for group in parser._action_groups:
        shown = [each for each in group._group_actions if each.help != argparse.SUPPRESS]
        if plain := [each for each in shown if not isinstance(each, argparse._SubParsersAction)]:
            title = str(group.title)
            yield f".SH {_escaped(SECTIONS.get(title, title.upper()))}"
            for action in plain:
                yield from (".TP", f"\\fB{_escaped(_invocation(action))}\\fR", _escaped(_help(action, parser)))
    verbs = _verbs_of(parser)
    if verbs is not None:
        yield ".SH COMMANDS"
        for each in verbs._choices_actions:
            yield from (".TP", f"\\fB{_escaped(each.dest)}\\fR", _escaped(each.help))
    yield from _notes(parser.epilog or "")


def _notes(epilog: str) -> Iterator[str]:
    """Yield what is printed after the options: notes, and the examples in the last part."""
    notes, mark, examples = epilog.partition("examples:\n")
    for title, text in (("NOTES", notes), ("EXAMPLES", examples if mark else "")):
        if text.strip():
            yield from (f".SH {title}", ".nf", *map(_escaped, text.strip("\n").splitlines()), ".fi")


def _verbs_of(parser: argparse.ArgumentParser) -> Any:
    return next((each for each in parser._actions if isinstance(each, argparse._SubParsersAction)), None)


def _invocation(action: argparse.Action) -> str:
    value = _value(action)
    return f"{', '.join(action.option_strings)} {value}".strip()


def _value(action: argparse.Action) -> str:
    """Return the value of an option or argument as ``--help`` writes it; empty for a flag."""
    if action.nargs == 0:
        return ""
    if action.metavar is not None:
        name = str(action.metavar)
    elif action.choices is not None and not isinstance(action, argparse._SubParsersAction):
        name = f"{{{','.join(map(str, action.choices))}}}"
    else:
        name = action.dest.upper() if action.option_strings else action.dest
    forms = {"?": "[{}]", "*": "[{} ...]", "+": "{0} [{0} ...]", argparse.REMAINDER: "..."}
    return forms.get(str(action.nargs), "{}").format(name)


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    values = {**vars(action), "prog": parser.prog}
    return " ".join(((action.help or "") % values).split())


def _escaped(text: str) -> str:
    """Return text that roff prints as it is."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq")
    text = re.sub(r"[^\x00-\x7f]", lambda found: f"\\[u{ord(found[0]):04X}]", text)
    # At the beginning of a line these are requests.
    return re.sub(r"^([ \t]*)\.", r"\1\\&.", text, flags=re.MULTILINE)
