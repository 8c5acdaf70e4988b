#!/usr/bin/env python3
"""Checks the pages of the documentation against the tree.

    check_pages.py REPOSITORY                 code blocks equal the example files that they name, links lead somewhere,
                                              code in backquotes that looks like a path of the tree is one, no line
                                              holds an absolute path; docs/architecture.md names every folder of
                                              include/, src/, src/cuda/, bindings/ and tests/, and cli, bench, examples, ladder
    check_pages.py REPOSITORY --fovea PATH    runs the `fovea explain`, `fovea info` and `fovea look --blocks` lines of the pages; a
                                              block of text under a picture of blocks must be what the line prints
    check_pages.py --self-test                checks that the checks catch what they should

A block that quotes a file stands under a comment `<!-- file: docs/examples/attend.cpp -->`.
"""

import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "examples", "ladder"]
QUOTED = re.compile(r"<!-- file: (\S+) -->\n+```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"^```sh\n(fovea look --blocks [^\n]*)\n```\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH_LIKE = re.compile(r"`((?:src|include|tests|docs|bench|bindings|cli|cmake|examples|ladder|tools|data)/[\w./-]+)`")
ABSOLUTE = re.compile(r"(?<![\w.~:/])/(?:home|work|tmp|root|usr|opt|Users)/")


def pages(root):
    for name in PAGES:
        path = root / name
        yield from sorted(path.rglob("*.md")) if path.is_dir() else [path] if path.exists() else []


def anchors(text):
    """The anchors that the headings of a page get."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while (name := f"{plain}-{number}" if number else plain) in found:
            number += 1
        found.add(name)
    return found


def problems_of(root, page):
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(root).as_posix()
    for file, block in QUOTED.findall(text):
        source = root / file
        if not source.is_file():
            yield f"{name}: quotes {file}, which is not there"
        elif source.read_text(encoding="utf-8") != block:
            yield f"{name}: the block under `file: {file}` differs from the file"
    prose = BLOCK.sub("", text)
    for link in LINK.findall(prose):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        to = page if not target else (page.parent / target).resolve()
        if not to.exists():
            yield f"{name}: links to {link}, which is not there"
        elif anchor and to.suffix == ".md" and anchor not in anchors(to.read_text(encoding="utf-8")):
            yield f"{name}: links to {link}, and there is no such heading"
    for path in PATH_LIKE.findall(prose):
        if not (root / path).exists() and not path.startswith(("docs/build", "bench/results/")):
            yield f"{name}: names {path}, which is not in the tree"
    for number, line in enumerate(text.splitlines(), 1):
        if ABSOLUTE.search(line):
            yield f"{name}:{number}: an absolute path"


def rooms(root):
    """The folders that docs/architecture.md has to name."""
    for parent in ("include", "src", "src/cuda", "bindings", "tests"):
        for path in sorted((root / parent).glob("*/")):
            name = path.relative_to(root).as_posix()
            if name != "src/cuda" and any(file.is_file() and file.suffix != ".pyc" for file in path.rglob("*")):
                yield name
    yield from (name for name in ("cli", "bench", "examples", "ladder") if (root / name).is_dir())


def missing_rooms(root):
    page = root / "docs/architecture.md"
    named = set(re.findall(r"`([\w./-]+?)/?`", page.read_text(encoding="utf-8"))) if page.exists() else set()
    return [f"docs/architecture.md: does not name {room}, a folder of the tree" for room in rooms(root) if room not in named]


def check(root):
    found = [problem for page in pages(root) for problem in problems_of(root, page)] + missing_rooms(root)
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    for example in sorted((root / "docs/examples").glob("*")):
        name = example.relative_to(root).as_posix()
        if name not in [file for file, _ in QUOTED.findall(text)]:
            found.append(f"README.md: does not quote {name}")
    return found


def commands_of(text):
    """`fovea explain`, `fovea info` and `fovea look --blocks` lines of the shell blocks, continued lines joined."""
    for language, block in BLOCK.findall(text):
        if language != "sh":
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if len(words) > 1 and words[0].split("/")[-1] == "fovea":
                if words[1] in ("explain", "info") or words[1:3] == ["look", "--blocks"]:
                    yield words[1:]


def pictures_of(text):
    """(words, text) of each `fovea look --blocks` line that stands alone in its block, with the text block after it."""
    for line, picture in PICTURE.findall(text):
        yield shlex.split(line)[1:], picture


def run_commands(root, fovea):
    failed = count = 0
    for page in pages(root):
        for words in commands_of(page.read_text(encoding="utf-8")):
            count += 1
            done = subprocess.run([fovea, *words], cwd=root, capture_output=True, text=True)
            if done.returncode != 0:
                print(f"{page.relative_to(root)}: fovea {shlex.join(words)}: {done.stderr.strip()}")
                failed += 1
        for words, picture in pictures_of(page.read_text(encoding="utf-8")):
            if subprocess.run([fovea, *words], capture_output=True, text=True).stdout != picture:
                print(f"{page.relative_to(root)}: fovea {shlex.join(words)} draws another picture")
                failed += 1
    print(f"{count} commands run, {failed} failed")
    return failed


def self_test():
    good = "# A title\n<!-- file: docs/examples/a.c -->\n```c\nint x;\n```\n[a](#a-title) [b](docs/b.md) `docs/b.md`\n"
    cases = [  # page, number of problems
        (good, 0),
        (good.replace("int x;", "int y;"), 1),
        (good.replace("docs/examples/a.c -->", "docs/examples/none.c -->"), 2),
        (good.replace("#a-title", "#another"), 1),
        (good.replace("(docs/b.md)", "(docs/c.md)"), 1),
        (good.replace("`docs/b.md`", "`docs/d.md`"), 1),
        (good + "see /home/someone/fovea\n", 1),
        (good + "see https://example.org/home/x and a/tmp/b\n", 0),
        ("nothing quoted\n", 1),
    ]
    wrong = 0
    for page, expected in cases:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            (root / "docs/examples").mkdir(parents=True)
            (root / "docs/examples/a.c").write_text("int x;\n", encoding="utf-8")
            (root / "docs/b.md").write_text("b\n", encoding="utf-8")
            (root / "README.md").write_text(page, encoding="utf-8")
            found = check(root)
            if len(found) != expected:
                print(f"expected {expected} problems, got {found} in:\n{page}")
                wrong += 1
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder).resolve()
        for name in ("src/core/a.hpp", "src/cuda/warp/a.cuh", "tests/host/a.cpp", "docs/architecture.md"):
            (root / name).parent.mkdir(parents=True)
            (root / name).write_text("`src/core/` `tests/host`\n", encoding="utf-8")
        if len(missing_rooms(root)) != 1 or "src/cuda/warp" not in missing_rooms(root)[0]:
            print(f"rooms: {missing_rooms(root)}")
            wrong += 1
    text = "```sh\nfovea info  # all\nbuild/release/bin/fovea explain --seqlen 4 \\\n  --causal\nmake\n```\n```\nfovea info\n```\n"
    if list(commands_of(text)) != [["info"], ["explain", "--seqlen", "4", "--causal"]]:
        print(f"commands: {list(commands_of(text))}")
        wrong += 1
    drawn = "```sh\nfovea look --blocks --sees \"k < 1\"\n```\n\n```text\n# .\n```\n"
    if list(pictures_of(text + drawn)) != [(["look", "--blocks", "--sees", "k < 1"], "# .\n")]:
        print(f"pictures: {list(pictures_of(text + drawn))}")
        wrong += 1
    print(f"{len(cases) + 3} cases, {wrong} wrong")
    return wrong


def main():
    if sys.argv[1:] == ["--self-test"]:
        return 1 if self_test() else 0
    if len(sys.argv) == 4 and sys.argv[2] == "--fovea":
        return 1 if run_commands(pathlib.Path(sys.argv[1]).resolve(), sys.argv[3]) else 0
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = check(pathlib.Path(sys.argv[1]).resolve())
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
