"""Pieces of the repository's files: code by function or by its first and last line, and rows of
the notes' tables by their first cell. What is not found, or is found twice, fails the build."""

import html
import pathlib
import re

import pygments
from pygments.formatters import HtmlFormatter
from pygments.lexers import CLexer, CppLexer

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def lines_of(path):
    return (ROOT / path).read_text(encoding="utf-8").splitlines()


def only(found, path, what):
    if len(found) != 1:
        raise LookupError(f"{path}: {what!r} is there {len(found)} times, not once")
    return found[0]


def find_function(path, lines, name):
    """A definition begins in the first column and ends with a brace there; comments and `template`
    right above it belong to it."""
    word = re.compile(rf"\b{re.escape(name)}\b\s*[({{]")
    starts = []
    for i, line in enumerate(lines):
        if not word.search(line) or line.lstrip().startswith(("//", "*", "/*")):
            continue
        first = i
        while lines[first][:1] in (" ", ")"):  # the return type may be on the line above
            first -= 1
        end = next((j for j in range(i, len(lines)) if lines[j][-1:] in ("{", ";")), i)
        if lines[end].endswith("{") and re.match(r"\w", lines[first]) and first + 2 > i:
            starts.append(first)
    first = only(starts, path, name)
    last = next(i for i in range(first, len(lines)) if lines[i].startswith("}"))
    while first > 0 and re.match(r"(//|template|/\*| \*)", lines[first - 1]):
        first -= 1
    return first, last


def find_lines(path, lines, begin, end):
    first = only([i for i, line in enumerate(lines) if begin in line], path, begin)
    for i in range(first, len(lines)):
        if end in lines[i]:
            return first, i
    raise LookupError(f"{path}: no {end!r} after {begin!r}")


def code(path, function=None, begin=None, end=None, caption=""):
    """A listing of a function, or of the lines from `begin` to `end`, both included."""
    lines = lines_of(path)
    if function:
        first, last = find_function(path, lines, function)
    else:
        first, last = find_lines(path, lines, begin, end or begin)
    cut = lines[first : last + 1]
    indent = min(len(line) - len(line.lstrip()) for line in cut if line and line[0] != "#")
    cut = [line if line[:1] == "#" else line[indent:] for line in cut]
    lexer = CppLexer() if path.endswith((".cu", ".cuh")) else CLexer()
    coloured = pygments.highlight("\n".join(cut), lexer, HtmlFormatter(nowrap=True)).rstrip()
    where = f"{path}, " + (
        f"lines {first + 1} to {last + 1}" if last > first else f"line {first + 1}"
    )
    text = f"{html.escape(caption)} " if caption else ""
    return (
        f'<figure class="code"><pre class="scroll" tabindex="0" role="group" aria-label="{where}">'
        f"<code>{coloured}</code></pre><figcaption>{text}<cite>{where}</cite></figcaption></figure>"
    )


def row(path, first_cell):
    """The cells of the only row of a document's tables that begins with this."""
    found = [line for line in lines_of(path) if line.startswith(f"| {first_cell}")]
    only(found, path, first_cell)
    return [cell.strip() for cell in found[0].strip("|").split("|")]
