"""Build the site of Fray: the pages of ``docs/`` and a reference of everything public, generated from the docstrings.

``python tools/build_docs.py [DIRECTORY]`` writes ``index.html`` and the rest into DIRECTORY (default: build/docs).
Every warning is an error: a link that leads nowhere, a name that is not there, a docstring that is not valid.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PUBLIC = {
    "fray": "Jobs, scopes, actors, pools and reservations for Trio programs.",
    "fray.blocking": "The same for sync code.",
    "fray.aio": "The same for asyncio programs.",
    "fray.v2": "Jobs and actors for sync code, on threads, Fray, Ray or Iris.",
    "fray.v2.ray_backend.backend": "The client of `fray.v2` on Ray.",
    "fray.v2.iris_backend": "The client of `fray.v2` on Iris.",
    "fray.job": "Functions, objects and actors behind a JobContext.",
}
"""Modules that users import names from, with a line on each."""
TESTING = "fray.testing"
PAGES_OF_ROOT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", nargs="?", type=Path, default=ROOT / "build" / "docs")
    directory = parser.parse_args().directory.resolve()
    sources = directory.with_name(directory.name + "-sources")
    shutil.rmtree(sources, ignore_errors=True)
    sources.mkdir(parents=True)
    copy_pages(sources)
    write_reference(sources / "reference")
    from sphinx.cmd.build import build_main

    strict = ["-q", "-n", "-W", "--keep-going"]
    return build_main([*strict, "-E", "-c", str(ROOT / "docs"), str(sources), str(directory)])


# Pages ---------------------------------------------------------------------------------------------------------------


def copy_pages(sources: Path) -> None:
    """Copy the pages into one directory, with their links and images, notebooks as pages with the outputs that are
    stored in them; programs that pages link to can be downloaded.
    """
    shutil.copytree(ROOT / "docs" / "images", sources / "images")
    for name in PAGES_OF_ROOT:
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text())
        (sources / name).write_text(copy_linked(text, ROOT, sources))
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        for name in PAGES_OF_ROOT:
            text = text.replace(f"](../{name}", f"]({name}")
        text = copy_linked(text.replace("](../", "](").replace(".ipynb)", ".md)"), ROOT, sources)
        if page.name == "index.md":
            text += contents(text)
        (sources / page.name).write_text(text)
    for notebook in sorted((ROOT / "docs").glob("*.ipynb")):
        from nbconvert import MarkdownExporter

        (sources / notebook.name).with_suffix(".md").write_text(MarkdownExporter().from_filename(str(notebook))[0])


def copy_linked(text: str, base: Path, sources: Path) -> str:
    """Copy the files of the repository that ``text`` links to and that are not pages; return the text."""
    for link in set(re.findall(r"\]\(([\w./-]+)\)", text)):
        file = base / link
        if file.suffix != ".md" and file.is_file():
            (sources / link).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, sources / link)
    return text


def contents(index: str) -> str:
    """Return the table of contents of the site: the pages in the order in which the index names them, by heading."""
    parts = ["", "```{toctree}", ":hidden:", "", "Start <README>", "```", ""]
    seen = {"README", "CONTRIBUTING"}
    heading, entries = "", []

    def part() -> list[str]:
        return ["```{toctree}", ":hidden:", f":caption: {heading}", "", *entries, "```", ""] if entries else []

    for line in index.splitlines():
        if titled := re.match(r"(?:\| \*\*(.*?)\*\*|## (.*))", line):
            parts += part()
            heading, entries = titled[1] or titled[2], []
        for name in re.findall(r"\]\(([\w-]+)\.md(?:#[\w-]*)?\)", line):
            if name not in seen:
                seen.add(name)
                entries.append(name)
    parts += part()
    entries = [*(f"reference/{name}" for name in [*PUBLIC, TESTING, "commands"]), "CHANGELOG", "CONTRIBUTING"]
    heading = "Reference"
    return "\n".join(parts + part())


# Reference -----------------------------------------------------------------------------------------------------------


def write_reference(directory: Path) -> None:
    """Write one page for each public module, one for the helpers of tests, and one for the commands."""
    directory.mkdir()
    owners: dict[int, str] = {}
    for name, about in PUBLIC.items():
        module = importlib.import_module(name)
        lines = list(module_lines(module, name, public_names(module), about, owners))
        (directory / f"{name}.rst").write_text("\n".join(lines))
    package = importlib.import_module(TESTING)
    lines = [*title(TESTING), "Fakes, faults and simulated machines for tests of programs that use Fray.", ""]
    for file in sorted(Path(str(package.__file__)).parent.glob("*.py")):
        if file.stem != "__init__":
            name = f"{TESTING}.{file.stem}"
            module = importlib.import_module(name)
            lines += [*title(name, "-"), f".. automodule:: {name}", ""]
            lines += [
                line for one in defined_names(module) for line in described(name, one, getattr(module, one), owners)
            ]
    (directory / f"{TESTING}.rst").write_text("\n".join(lines))
    (directory / "commands.md").write_text("\n".join(command_lines()))


def public_names(module: ModuleType) -> list[str]:
    """Return the names that a module exports; without ``__all__``, its public classes and functions."""
    return sorted(getattr(module, "__all__", None) or defined_names(module))


def defined_names(module: ModuleType) -> list[str]:
    """Return the names of public classes and functions defined in ``module``, in the order of the source."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def module_lines(module: ModuleType, name: str, names: list[str], about: str, owners: dict[int, str]) -> Iterator[str]:
    """Describe a public module: functions, then classes, then errors."""
    yield from [*title(name), about, "", f".. py:module:: {name}", ""]
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": [], "Types": []}
    for one in names:
        kinds[kind_of(getattr(module, one))].append(one)
    for kind, members in kinds.items():
        if members:
            yield from title(kind, "-")
        for one in members:
            yield from described(name, one, getattr(module, one), owners)


def kind_of(value: Any) -> str:
    if inspect.isclass(value):
        return "Errors" if issubclass(value, BaseException) else "Classes"
    return "Functions" if callable(value) and hasattr(value, "__code__") else "Types"


def described(module: str, name: str, value: Any, owners: dict[int, str]) -> Iterator[str]:
    """Describe one name; a name that another module exports too is described there, and refers to it here."""
    owner = owners.setdefault(id(value), f"{module}.{name}")
    kind = kind_of(value)
    if owner != f"{module}.{name}":
        directive = {"Functions": "py:function", "Types": "py:data"}.get(kind, "py:class")
        brackets = "(...)" if kind == "Functions" else ""
        yield from [
            f".. {directive}:: {name}{brackets}",
            f"   :module: {module}",
            "",
            f"   The same as :py:obj:`{owner}`.",
            "",
        ]
    elif kind == "Functions":
        yield from [f".. autofunction:: {module}.{name}", ""]
    elif kind == "Types":
        yield from [f".. autodata:: {module}.{name}", ""]
    else:
        outside = {
            base.__name__ for base in value.__mro__[1:] if not base.__module__.startswith("fray") or id(base) in owners
        }
        yield f".. {'autoexception' if kind == 'Errors' else 'autoclass'}:: {module}.{name}"
        yield from ["   :members:", "   :undoc-members:", f"   :inherited-members: {', '.join(sorted(outside))}"]
        if value.__bases__ != (object,):
            yield "   :show-inheritance:"
        yield ""


def title(text: str, line: str = "=") -> list[str]:
    return [text, line * len(text), ""]


# Commands ------------------------------------------------------------------------------------------------------------


def command_lines() -> Iterator[str]:
    """Describe the three commands by their own help texts."""
    from fray.cli.options import parser_of
    from fray.controller.options import parse as parse_controller
    from fray.node.main import parse as parse_node

    os.environ["COLUMNS"] = "110"
    yield from ["# Commands", ""]
    parser = parser_of()
    yield from help_lines("fray", parser.format_help())
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, inner in action.choices.items():
                yield from help_lines(f"fray {verb}", inner.format_help(), "###")
    yield from help_lines("fray-controller", help_of(parse_controller))
    yield from help_lines("fray-node", help_of(parse_node))


def help_of(parse: Callable[[list[str]], object]) -> str:
    """Return the text that a parser prints for ``--help``."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        parse(["--help"])
    return printed.getvalue()


def help_lines(command: str, text: str, heading: str = "##") -> list[str]:
    return [f"{heading} {command}", "", "```text", text.rstrip(), "```", ""]


if __name__ == "__main__":
    sys.exit(main())
