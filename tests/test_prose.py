"""Checks of wording: banned words, first words of docstrings, and one-line descriptions of modules.

Run as a script, it prints what it finds in the paths given: ``python tests/test_prose.py fray/net docs/tour.md``.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

BANNED = {
    *("nobody", "somebody", "whoever", "anew", "told", "law", "laws", "house", "houses", "wish", "wishes", "shelf"),
    *("shelves", "parcel", "parcels", "brood", "broods", "muster", "musters", "crew", "errand", "errands", "keeper"),
    *("keepers", "anybody", "whosoever", "mend", "mends", "mended"),
}
PHRASES = {
    "X is no Y": (
        r"(?<!there )(?<!There )",
        r"\b(is|are|was|were) (no|none)\b",
        r"(?! (longer|more|less|sooner|later|earlier|bigger|greater|room)\b)",
    ),
    "goes on": ("", r"\b(go|goes|went|going|gone) on\b", r"(?! (to|a|the|its|this|that|with)\b)"),
    "is over": ("", r"\b(is|are|was|were) over\b", r"(?= *([.,;:)\"'`]|$|and\b|when\b|before\b|at once\b))"),
}
"""What is before a banned phrase, its words, and what is after it."""
BANNED_PHRASES = {name: re.compile("".join(parts)) for name, parts in PHRASES.items()}
ANY_PHRASE = re.compile("|".join(words.replace(" ", r"\s+") for _, words, _ in PHRASES.values()))
"""The words of any of them, in a text with its line breaks."""

FIRST_WORDS = {
    *("of", "in", "on", "at", "by", "for", "from", "to", "with", "without", "within", "after", "before", "between"),
    *("into", "under", "over", "through", "during", "against", "about", "as", "beside", "besides", "until", "since"),
    *("upon", "towards", "behind", "below", "above", "among", "across", "beyond", "per"),
    *(
        "what",
        "which",
        "who",
        "whom",
        "whose",
        "where",
        "when",
        "why",
        "how",
        "whether",
        "that",
        "if",
        "while",
        "because",
    ),
    *("it", "its", "he", "his", "him", "she", "her", "they", "their", "them", "this", "these", "those", "we", "you"),
    *("i", "one's", "nothing", "something", "someone", "so"),
}
"""First words that make a docstring the second half of a sentence whose first half is the name."""

EXCEPTIONS: dict[str, dict[str, str]] = {
    "docs/glossary.md": {"keeper": "the second half of ZooKeeper, a product's name"}
}
"""File: word, and the reason why it may be used there. At most ten."""

DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
WORD = re.compile(r"[A-Za-z]+")
CODE_DIRECTORIES = ("fray", "tests", "bench", "examples", "tools")
SELF = "tests/test_prose.py"


def words_in(text: str) -> set[str]:
    """The words of ``text`` in lower case; identifiers are split at underscores and capitals."""
    split = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text).replace("_", " ")
    return {word.lower() for word in WORD.findall(split)}


def banned_in(text: str) -> Iterator[str]:
    """Banned words and phrases in ``text``."""
    yield from sorted(BANNED & words_in(text))
    line = " ".join(text.split())
    for name, pattern in BANNED_PHRASES.items():
        yield from (f"{name}: …{line[max(0, m.start() - 25) : m.end() + 20]}…" for m in pattern.finditer(line))


def banned_of(path: str, text: str) -> Iterator[str]:
    """Sentences about the banned words of the file ``path`` (relative to the repository) with this text."""
    allowed = EXCEPTIONS.get(path, {})
    # One look at the text is much quicker than its tokens, and enough for most files.
    if not BANNED & words_in(text) and not ANY_PHRASE.search(text):
        return
    if path.endswith(".py"):
        found = []
        for token in tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__):
            if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
                found += [(token.start[0], word) for word in banned_in(token.string)]
    else:
        paragraphs: list[tuple[int, str]] = []
        for number, line in enumerate(text.splitlines(), 1):
            if paragraphs and line.strip() and paragraphs[-1][1]:
                paragraphs[-1] = (paragraphs[-1][0], paragraphs[-1][1] + "\n" + line)
            else:
                paragraphs.append((number, line.strip()))
        found = [(number, word) for number, paragraph in paragraphs for word in banned_in(paragraph)]
    for line, word in found:
        if word not in allowed:
            yield f"{path}:{line}: {word}"


def docstrings_of(path: str, text: str) -> Iterator[str]:
    """Sentences about docstrings of ``path`` whose first word continues the name instead of describing it."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        bodies = getattr(node, "body", None)
        if not isinstance(bodies, list):
            continue
        for position, statement in enumerate(bodies):
            is_text = (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            )
            if not is_text:
                continue
            defines = position == 0 and isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            )
            describes = position > 0 and isinstance(bodies[position - 1], ast.Assign | ast.AnnAssign)
            value = statement.value.value.strip()
            first = re.split(r"[\s,.:;]", value, maxsplit=1)[0].lower()
            if (defines or describes) and first in FIRST_WORDS:
                yield f"{path}:{statement.lineno}: docstring begins with {first!r}: {value.splitlines()[0][:70]}"


def modules_of(path: str, text: str) -> Iterator[str]:
    """A sentence about a module of ``fray`` whose docstring has no first line of its own that ends with a full stop."""
    docstring = ast.get_docstring(ast.parse(text))
    if not docstring:
        yield f"{path}: no docstring"
        return
    first, _, rest = docstring.partition("\n")
    if not first.endswith(".") or rest.split("\n")[0].strip():
        yield f"{path}: the first line is one phrase that ends with a full stop: {first[:80]}"


def findings(path: str, text: str) -> Iterator[str]:
    """Everything that is wrong with the wording of one file."""
    if path == SELF:
        return
    yield from banned_of(path, text)
    if path.endswith(".py"):
        if path.startswith(CODE_DIRECTORIES):
            yield from docstrings_of(path, text)
        if path.startswith("fray/"):
            yield from modules_of(path, text)


def files(*within: str) -> Iterator[str]:
    """The files whose wording is checked, relative to the repository."""
    for directory in within or (*CODE_DIRECTORIES, "docs"):
        start = ROOT / directory
        for path in sorted([start] if start.is_file() else start.rglob("*")):
            if path.suffix in (".py", ".md", ".txt") and "__pycache__" not in path.parts and path.is_file():
                yield path.relative_to(ROOT).as_posix()
    if not within:
        yield from ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "tools/venv")


def test_wording_follows_the_terms_of_the_field() -> None:
    found = [sentence for path in files() for sentence in findings(path, (ROOT / path).read_text())]
    assert not found, f"{len(found)} places:\n" + "\n".join(found[:100])


def test_exceptions_are_few_and_each_is_used() -> None:
    assert len(EXCEPTIONS) <= 10
    for path, words in EXCEPTIONS.items():
        present = words_in((ROOT / path).read_text())
        assert all(word in present for word in words), path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('raise ValueError("nobody listens")\n', "nobody"),
        ("def told(x):\n    return x\n", "told"),
        ("wishes_moved = 1\n", "wishes"),
        ("class LawBroken: pass\n", "law"),
        ('x = "it is no band"\n', "X is no Y"),
        ('x = "the run goes on."\n', "goes on"),
        ('x = "the wait is over."\n', "is over"),
    ],
)
def test_a_banned_word_is_found(text: str, expected: str) -> None:
    assert any(expected in sentence for sentence in banned_of("fray/x.py", text))


@pytest.mark.parametrize(
    "text",
    [
        'x = "there is no driver"\n',
        'x = "it is no longer here"\n',
        'x = "lawful household"\n',
        'x = "the limit is over 5 s"\n',
    ],
)
def test_ordinary_english_is_allowed(text: str) -> None:
    assert not list(banned_of("fray/x.py", text))


@pytest.mark.parametrize("docstring", ["Of one node.", "It is ended.", "What is asked.", "Whether it runs."])
def test_a_docstring_that_continues_its_name_is_found(docstring: str) -> None:
    assert list(docstrings_of("fray/x.py", f'def f():\n    """{docstring}"""\n'))


if __name__ == "__main__":
    places = [sentence for path in files(*sys.argv[1:]) for sentence in findings(path, (ROOT / path).read_text())]
    print(*places, sep="\n")
    sys.exit(f"{len(places)} places" if places else 0)
