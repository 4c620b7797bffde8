"""Finds sentences that are hard to read: `python -m tests.prose [PATH ...]` shows each one.

A sentence fails if it has more than MOST_WORDS words, if it begins with a phrase or a pronoun in
place of a subject, or if it contains a word of `words.toml`. Texts are Markdown, the texts of pages
(HTML and JavaScript), docstrings, comments, and strings of several words: errors, logs and help.
Tests and generated references are not read. Without paths, shares above the limits are an error.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MOST_WORDS = 25  # in a sentence
LEAST_WORDS = 4  # of a string that counts as a text, and 3 of a sentence
MOST_OF_ALL = 0.04  # share of all sentences that may fail
MOST_FOR_USERS = 0.02  # the same in documents, the page and help texts
FOR_USERS = (
    "README.md",
    "docs/",
    "specserve/server/page/",
    "specserve/cli/",
    "specserve/config.py",
)
UNREAD = ("tests/", "docs/reference/", "LICENSE", "CHANGELOG.md")

STARTS = re.compile(
    r"(Of|By(?! default\b)|From|With(?!out)|In what|As far as|What|Who|Whose|Whoever|Nobody"
    r"|Nothing|Those|Such|That of|Where|Beside|There)\b"
)
END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[^\s\w]*[A-Z`0-9])|(?<=:)\s+(?=[A-Z])")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|approx|et al|etc|No)\.$")
CODE = re.compile(r"`[^`]*`")
NOT_PROSE = re.compile(r"noqa|type: ignore|fmt: (on|off|skip)|pragma|^!/|^-\*-|^SPDX")


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Fault(NamedTuple):
    kind: str
    sentence: str


def words(path: Path = ROOT / "tests/words.toml") -> re.Pattern[str]:
    """The private words of a list, as one pattern."""
    return re.compile(rf"\b({'|'.join(tomllib.loads(path.read_text()))})\b", re.IGNORECASE)


WORDS = words()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.prose", description=__doc__.split("\n")[0]
    )
    parser.add_argument("paths", nargs="*", help="files or folders; none: all, against the limits")
    paths = parser.parse_args().paths
    found = {name: check(name) for name in tracked(paths)}
    for name, (_, faults) in found.items():
        for fault in faults if paths else ():
            print(f"{name}: {fault.kind}: {fault.sentence}")
    users = [found[name] for name in found if name.startswith(FOR_USERS)]
    is_fine = report("all texts", found.values(), MOST_OF_ALL)
    is_fine &= report("documents, page and help", users, MOST_FOR_USERS)
    return 0 if paths or is_fine else 1


def tracked(paths: Iterable[str] = ()) -> list[str]:
    """The files in the repository that have texts."""
    run = subprocess.run(
        ["git", "ls-files", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = run.stdout.splitlines()
    return [n for n in names if Path(n).suffix in READERS and not n.startswith(UNREAD)]


def report(of: str, checked: Iterable[tuple[int, list[Fault]]], most: float) -> bool:
    """Print a share; whether it is within the limit."""
    counts, faults = zip(*checked, strict=True) if (checked := [*checked]) else ((), ())
    bad = [fault.kind for each in faults for fault in each]
    share = len(bad) / max(sum(counts), 1)
    kinds = ", ".join(f"{bad.count(kind)} {kind}" for kind in ("long", "start", "word"))
    print(f"{of}: {len(bad)} of {sum(counts)} sentences ({share:.1%}, limit {most:.0%}): {kinds}")
    return bool(share <= most)


def check(name: str) -> tuple[int, list[Fault]]:
    """How many sentences a file has, and those that fail."""
    path, count, faults = ROOT / name, 0, list[Fault]()
    for text in READERS[path.suffix](path.read_text()):
        for sentence in sentences(text):
            count += 1
            if kind := fault_of(sentence):
                faults.append(Fault(kind, sentence))
    return count, faults


def sentences(text: str) -> Iterator[str]:
    """The sentences of a paragraph; pieces of fewer than three words are none."""
    held = ""
    for piece in END.split(" ".join(text.split())):
        held = f"{held} {piece}".strip()
        if not ABBREVIATION.search(held):
            if len(plain(held).split()) > 2:
                yield held
            held = ""


def plain(sentence: str) -> str:
    """The words only: code is one word, and a link is its text."""
    sentence = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", CODE.sub("x", sentence))
    return re.sub(r"[*_|#>]+|https?://\S+", " ", sentence)


def fault_of(sentence: str) -> str | None:
    bare = plain(sentence)
    if len([word for word in bare.split() if any(map(str.isalnum, word))]) > MOST_WORDS:
        return "long"
    if STARTS.match(bare.lstrip(" \"'(")) and not bare.rstrip(" \"')").endswith("?"):
        return "start"
    return "word" if WORDS.search(bare) else None


def markdown(text: str) -> Iterator[str]:
    text = re.sub(r"^ *(```|~~~).*?^ *\1", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<[^>\n]+>", " ", text)
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip().removeprefix("> ") for line in block.splitlines()]
        if lines and lines[0].startswith("|"):
            yield from (cell for line in lines for cell in line.split("|"))
        else:
            kept = "\n".join(line for line in lines if not line.startswith(("#", "!!!")))
            yield from re.split(r"(?:^|\n)(?:[-*]|\d+[.)])\s", kept)


def python(text: str) -> Iterator[str]:
    """Docstrings by paragraph and field, strings that look like texts, and comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and (doc := ast.get_docstring(node)):
            yield from docstring(doc)
    yield from strings(text)
    run = list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            run.append(token.string.lstrip("#: "))
        elif token.type == tokenize.NEWLINE or (token.type != tokenize.NL and run):
            yield from comment(run)
            run = []


def strings(text: str) -> Iterator[str]:
    """The strings of Python code that look like texts: errors, logs and help, no docstrings."""
    for node in pieces(ast.parse(text)):
        if is_text(string := joined(node)):
            yield string


def pieces(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Whole strings but docstrings; the parts of an f-string are not strings of their own."""
    is_documented = isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None
    skipped = node.body[0] if is_documented else None  # type: ignore[attr-defined]
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr) or (
            isinstance(child, ast.Constant) and isinstance(child.value, str)
        ):
            yield child
        elif child is not skipped:
            yield from pieces(child)


def joined(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(v.value) if isinstance(v, ast.Constant) else "x" for v in node.values)


def is_text(string: str) -> bool:
    """Whether a string has words enough, and nothing that prose has not: markup, patterns, code."""
    some = re.sub(r"%[\w.(]*[sdrfg]", "x", string)
    letters = [
        word for word in some.split() if re.fullmatch(r"[\"'(`-]*[A-Za-z][\w'.,:;)`\"/-]*", word)
    ]
    return (
        len(letters) >= LEAST_WORDS
        and len(letters) > 0.6 * len(some.split())
        and not re.search(r"[{}\\]|</|\(\?|==|\bdef |\bimport |\$\w", some)
    )


def docstring(doc: str) -> Iterator[str]:
    """Paragraphs, and the fields of a table `name  text` with lines that go on further right."""
    for block in re.split(r"\n\s*\n", doc):
        fields = re.split(r"\n(?=\w+(?:, \w+)* {2,})", "\n" + block)
        yield fields[0]
        for field in fields[1:]:
            yield field.partition("  ")[2]


def comment(run: list[str]) -> Iterator[str]:
    if run and not NOT_PROSE.search(text := " ".join(run)):
        yield text


def marked(mark: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|\s){mark}+\s?(.*)$")


def lines_after(mark: str, text: str) -> Iterator[str]:
    """The comments behind a mark; lines in a row are one text."""
    run, pattern = list[str](), marked(mark)
    for line in [*text.splitlines(), ""]:
        if found := pattern.search(line):
            run.append(found[1])
        else:
            yield from comment(run)
            run = []


def cpp(text: str) -> Iterator[str]:
    yield from lines_after("//", text)
    yield from re.findall(r"/\*(.*?)\*/", text, re.DOTALL)


def script(text: str) -> Iterator[str]:
    yield from cpp(text)
    code = re.sub(r"(^|\s)//.*$|/\*.*?\*/", "", text, flags=re.MULTILINE)
    for _, string in re.findall(r"([\"'`])((?:(?!\1)[^\\\n]|\\.)*)\1", code):
        if is_text(re.sub(r"\$\{[^}]*\}", "x", string)):
            yield string


class Texts(HTMLParser):
    """The texts of a page by element; those of scripts and styles are none."""

    INLINE = frozenset({"a", "b", "code", "em", "kbd", "span", "strong", "output", "time"})

    def __init__(self) -> None:
        super().__init__()
        self.texts, self.inside = [""], ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.texts += [v for k, v in attrs if k in ("title", "placeholder", "aria-label") and v]
        if tag not in self.INLINE:
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""
        if tag not in self.INLINE:
            self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.texts[-1] += data


def html(text: str) -> Iterator[str]:
    parser = Texts()
    parser.feed(text)
    yield from parser.texts


def settings(text: str) -> Iterator[str]:
    yield from lines_after("#", text)


READERS = {
    ".md": markdown,
    ".py": python,
    ".cpp": cpp,
    ".h": cpp,
    ".js": script,
    ".html": html,
    ".toml": settings,
    ".yaml": settings,
    ".yml": settings,
}

if __name__ == "__main__":
    sys.exit(main())
