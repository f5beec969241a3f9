"""The terminal as a whole screen: its modes, which are restored, and keys."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import trio

ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Alternate screen without a cursor, so that what was on the terminal before is there again afterwards."""
KEYS = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b": "escape",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
}


def is_terminal() -> bool:
    """Return whether a person sees standard output and types on standard input."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextmanager
def full_screen() -> Iterator[None]:
    """Take the whole terminal, with single keys readable, and restore it after the block."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard, termios.TCSADRAIN)  # Ctrl-C remains a signal
        modes = termios.tcgetattr(keyboard)
        # Ctrl-Z would leave the shell with this screen and these modes.
        modes[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(keyboard, termios.TCSADRAIN, modes)
        sys.stdout.write(ENTER_SCREEN)
        sys.stdout.flush()
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        sys.stdout.write(LEAVE_SCREEN)
        sys.stdout.flush()


@contextmanager
def raw_keyboard() -> Iterator[None]:
    """Read each key as it is, also Ctrl-C, and let what is printed pass unchanged; restore the terminal afterwards."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setraw(keyboard, termios.TCSADRAIN)  # what was typed already is kept
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


async def read_keys() -> list[str]:
    """Wait for keys; return each as a name of `KEYS` or the character that it writes. Empty: the terminal is closed."""
    keyboard = sys.stdin.fileno()
    await trio.lowlevel.wait_readable(keyboard)
    return keys_of(os.read(keyboard, 256))


def keys_of(data: bytes) -> list[str]:
    """Return the keys in what a terminal has sent; sequences of unknown keys are left out."""
    if data.startswith(b"\x1b"):
        # A key sends its sequence at once.
        return [KEYS[data]] if data in KEYS else []
    text = data.decode("utf-8", "ignore")
    return [KEYS.get(character.encode(), character) for character in text]
