"""``fray completion``: what may follow a beginning of a command, for bash, zsh and fish; with names that live."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from fray.cli.options import parser_of
from fray.cli.parsing import Parser, add_common

ANSWER_S = 2.0
"""Seconds that a controller has to answer with names: a person waits for them."""
NAMES_LIMIT = 500
"""Newest jobs whose names are offered."""
JOBS, NODES, ACTORS = frozenset({"job", "jobs", "of_job"}), frozenset({"node", "nodes"}), frozenset({"actor"})
"""Names of the arguments that name jobs, machines, and actors."""
SCRIPTS = {
    "bash": """\
_fray() {
    local IFS=$'\\n'
    COMPREPLY=($(fray completion bash --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -o nosort -F _fray fray
""",
    "zsh": """\
#compdef fray
_fray() {
    local -a found
    found=(${(f)"$(fray completion zsh --words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -a found; else _files; fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _fray fray
""",
    "fish": """\
function __fray
    fray completion fish --words (commandline -opc)[2..] (commandline -ct) 2>/dev/null
end
complete -c fray -n '__fray | count >/dev/null' -f
complete -c fray -a '(__fray)'
""",
}
"""Scripts that have the shell ask `completion`."""


def completion(options: argparse.Namespace) -> int:
    """Run ``fray completion``: print the script of a shell, or with ``--words`` what may take the place of the last."""
    if options.words is None:
        print(SCRIPTS[options.shell], end="")
        return 0
    words = options.words or [""]
    print(*candidates(words), sep="\n")
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """Return what may take the place of the last word, sorted; empty where files are meant, or nothing is known.

    Args:
        words: of a command after ``fray``, the last one as far as it is written.
    """
    *before, last = words
    parser, expects, given = _walk(before)
    if expects is not None:
        found = _values(parser, expects, before)
    elif last.startswith("-"):
        found = [text for action in parser._actions for text in action.option_strings if text.startswith("--")]
    else:
        positional = [action for action in parser._actions if not action.option_strings]
        place = positional[min(given, len(positional) - 1)] if positional else None
        is_over = place is not None and given >= len(positional) and place.nargs not in ("*", "+")
        found = [] if place is None or is_over else _values(parser, place, before)
    return sorted({text for text in found if text.startswith(last)})


def _walk(words: Iterable[str]) -> tuple[Parser, argparse.Action | None, int]:
    """Return the parser of the verb, the option that expects a value, and how many of its arguments are there."""
    parser: Any = parser_of()
    expects, given = None, 0
    for word in words:
        if expects is not None:
            expects = None
        elif word.startswith("-"):
            action = parser._option_string_actions.get(word)
            expects = action if action is not None and action.nargs != 0 else None
        elif (below := _verbs(parser)) is not None:
            parser = below.choices.get(word, parser)
        else:
            given += 1
    return parser, expects, given


def _verbs(parser: Parser) -> Any:
    return next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)


def _values(parser: Parser, action: argparse.Action, words: Sequence[str]) -> Iterable[str]:
    """Return the values of an option or argument."""
    if action.choices is not None:
        return [str(each) for each in action.choices]
    is_of_cluster = not str(parser.get_default("verb") or "").startswith(("rl.", "tinker."))
    if is_of_cluster and action.dest in JOBS | NODES | ACTORS:
        return _living(action.dest, words)
    return []


def _living(argument: str, words: Sequence[str]) -> list[str]:
    """Return what an argument may name in the cluster that the words name; nothing if it does not answer."""
    import trio

    from fray.cli.target import open_target
    from fray.errors import FrayError

    where = Parser(add_help=False)
    add_common(where)
    target, _ = where.parse_known_args(list(words))

    async def ask() -> list[str]:
        with trio.move_on_after(ANSWER_S):
            async with open_target(target) as cluster:
                if argument in JOBS:
                    return [info.name for info in await cluster.list_jobs("*", limit=NAMES_LIMIT)]
                if argument in ACTORS:
                    return [info.name for info in await cluster.list_actors("", "*")]
                return [node.name for node in await cluster.nodes()]
        return []

    found: list[str] = []
    try:
        found = trio.run(ask)
    except* FrayError:
        pass
    return found
