#!/usr/bin/env python3
"""Measures the sizes of the tree: longest functions, files that name one tensor, files and lines of each room.

    house.py REPOSITORY               prints the tables
    house.py REPOSITORY --functions N prints the N longest functions of src/, one per line
    house.py REPOSITORY --write       writes the tables into docs/architecture.md, between its markers
    house.py REPOSITORY --check       exit status 1 when those tables are stale: a name differs, or a number is off by over
                                      10 %. Seconds are not checked: they come from bench/results/house/seconds.json, a measurement.
    house.py REPOSITORY --heads       exit status 1 when a file of src/ does not begin with a comment that says what it holds
    house.py --self-test              checks the counting of functions on small sources

A function is counted from the line of its name to the line of its closing brace. Lambdas count as part of the function around them.
No compiler is used: comments, strings and preprocessor lines are blanked and braces are matched.
"""

import json
import pathlib
import re
import sys

SOURCES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inc"}
CODE = SOURCES | {".py", ".toml"}
NOT_FUNCTIONS = {"if", "for", "while", "switch", "catch", "alignas", "decltype", "sizeof", "return", "requires", "noexcept",
                 "__launch_bounds__", "__attribute__", "__align__", "static_assert", "asm", "throw", "new"}
ROOMS = ["include", "src/core", "src/tile", "src/expr", "src/cpu", "src/cuda/ptx", "src/cuda/warp", "src/cuda/kernels", "src/cuda/launch",
         "src/plan", "src/capi", "src/verify", "src/io", "cli", "bench", "bindings", "integrations", "ladder", "tests", "tools"]
TENSOR = re.compile("block_?mask", re.IGNORECASE)  # an optional tensor that every layer has to know of
PAGE = "docs/architecture.md"
BEGIN = "<!-- table: house -->\n"
END = "<!-- end of table -->"
TIMES = "bench/results/house/seconds.json"

BLANKED = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"([^\s()]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Za-z_])\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
NAMED_CALL = re.compile(r"(~?\w+|operator\s*[^\s\w(]+|operator\s*\(\))\s*\(")


def blanked(text):
    """The text with comments, strings and preprocessor lines turned into spaces; line numbers stay."""
    spaces = lambda match: re.sub(r"[^\n]", " ", match.group())
    return DIRECTIVE.sub(spaces, BLANKED.sub(spaces, text))


def function_name(head):
    """(name, offset) of the function whose declaration `head` is, up to its opening brace; None for anything else.

    A declaration has a name and a parameter list outside any other bracket, and after it only qualifiers, a return type or
    the initialisers of a constructor.
    """
    if re.match(r"\s*(?:namespace|class|struct|union|enum|extern)\b(?![^(]*\()", head) or re.search(r"[^=!<>]=\s*$", head):
        return None
    depth = 0
    previous = 0
    for match in re.finditer(r"[()\[\]{}]", head):
        if match.group() in ")]}":
            depth -= 1
        else:
            if match.group() == "(" and depth == 0:
                names = list(NAMED_CALL.finditer(head, previous, match.end()))
                if names and names[-1].end() == match.end() and names[-1].group(1) not in NOT_FUNCTIONS:
                    if re.search(r"[^=!<>]=[^=]", head[:names[-1].start()].split("operator")[0].rpartition(">")[2]):
                        return None  # an initialiser, not a declaration
                    return names[-1].group(1), names[-1].start(1)
            depth += 1
        previous = match.end() if depth == 0 else previous
    return None


def functions(text):
    """Yields (lines, first line, name) of each function of a source."""
    text = blanked(text)
    open_braces = 0
    last = 0
    inside = None  # (depth of its brace, first line, name)
    initialiser = None  # depth of the brace of a member's initialiser, as in `S() : member{1} {`
    for match in re.finditer(r"[{};]", text):
        if match.group() == "{":
            if inside is None and re.search(r"\)[^;]*[^:]:[^:;]*\w$", text[last:match.start()]):
                initialiser = open_braces
            elif inside is None and initialiser is None:
                found = function_name(text[last:match.start()])
                if found:
                    inside = (open_braces, text.count("\n", 0, last + found[1]) + 1, found[0])
            open_braces += 1
        elif match.group() == "}":
            open_braces -= 1
            if initialiser == open_braces:
                initialiser = None
                continue
            if inside and open_braces == inside[0]:
                first = inside[1]
                yield text.count("\n", 0, match.start()) + 2 - first, first, inside[2]
                inside = None
        in_for = match.group() == ";" and text.count("(", last, match.start()) > text.count(")", last, match.start())
        if initialiser is None and not in_for:
            last = match.end()


def files_of(root, room, suffixes):
    """Files of a room with one of these suffixes."""
    return [path for path in sorted((root / room).rglob("*"))
            if path.suffix in suffixes and path.is_file() and "__pycache__" not in path.parts]


def longest(root, room):
    """(lines, path, first line, name) of the functions of a room, longest first."""
    found = [(lines, path.relative_to(root).as_posix(), line, name)
             for path in files_of(root, room, SOURCES) for lines, line, name in functions(path.read_text(encoding="utf-8"))]
    return sorted(found, key=lambda row: (-row[0], row[1], row[2]))


def naming(root, room):
    """How many files of code of a room name TENSOR."""
    return sum(bool(TENSOR.search(path.read_text(encoding="utf-8")))
               for path in files_of(root, room, CODE) if path.name != "house.py")


def rooms(root):
    """Folders that the table has a row for: those of ROOMS that exist."""
    return [room for room in ROOMS if (root / room).is_dir()]


def without_head(root):
    """Files of src/ whose first line, but for #pragma once, is no comment."""
    for path in files_of(root, "src", SOURCES):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and line != "#pragma once"]
        if not lines or not lines[0].startswith("//"):
            yield path.relative_to(root).as_posix()


def tables(root):
    """The Markdown of both tables, without the markers."""
    kernels = sorted(row for room in ("ptx", "warp", "kernels") for row in longest(root, "src/cuda/" + room))[-1:]
    code = sum(naming(root, room) for room in ("include", "src", "cli", "bench", "bindings", "tools"))
    tests = naming(root, "tests")
    lines = ["| what | measured |", "|---|---:|"]
    if kernels:
        lines.append(f"| longest function of a kernel | {kernels[0][0]} lines, `{kernels[0][3]}` |")
    lines += [f"| files that name the tensor `block_mask`, code | {code} |",
              f"| files that name the tensor `block_mask`, tests | {tests} |"]
    times = root / TIMES
    measured = json.loads(times.read_text(encoding="utf-8")) if times.is_file() else {}
    where = f", {measured['machine']}" if "machine" in measured else ""
    for target in ("run", "test"):
        seconds = measured.get(f"make_{target}_seconds")
        shown = f"{seconds:,.0f} s" if seconds is not None else f"`make time-{target}` has not been run"
        lines.append(f"| `make {target}` from a bare clone{where} | {shown} |")
    lines += ["", "| room | files | lines | longest function |", "|---|---:|---:|---|"]
    for room in rooms(root):
        files = files_of(root, room, CODE)
        total = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        first = longest(root, room)
        name = f"{first[0][0]} lines, `{first[0][3]}`" if first else ""
        lines.append(f"| `{room}` | {len(files)} | {total:,} | {name} |")
    return "\n".join(lines) + "\n"


def block_of(page):
    """(text before, the tables, text after) of the page."""
    before, found, rest = page.partition(BEGIN)
    block, ended, after = rest.partition(END)
    if not found or not ended:
        sys.exit(f"{PAGE}: expected the lines {BEGIN.strip()} and {END} around the table of sizes")
    return before, block, after


def close(written, measured):
    """Whether two rows say the same: equal words, numbers at most 10 % apart. Names of longest functions may differ."""
    if "make " in measured:
        return True
    numbers = r"\d[\d,]*"
    words = [re.sub(r"`\w+` \|$", "|", re.sub(numbers, "#", row)) if "lines, `" in row else re.sub(numbers, "#", row)
             for row in (written, measured)]
    values = [[int(n.replace(",", "")) for n in re.findall(numbers, row)] for row in (written, measured)]
    return words[0] == words[1] and all(abs(a - b) <= max(1, 0.1 * b) for a, b in zip(*values))


def stale(written, measured):
    """The rows of the measured tables that the written ones miss."""
    rows = written.splitlines(), measured.splitlines()
    first = [["make" if "make " in row else row.split("|")[1] if "|" in row else row for row in side] for side in rows]
    if first[0] != first[1]:
        differing = sorted(set(first[0]) ^ set(first[1]))
        return [f"rows of the table and of the tree differ: {', '.join(cell.strip() for cell in differing) or 'their order'}"]
    return [f"has {a!r}, measured {b!r}" for a, b in zip(*rows) if not close(a, b)]


def self_test():
    source = """\
// int comment() {
#define MACRO(x) \\
  if (x) {
namespace a {
struct S {
  int x = f({1, 2});
  explicit S(int y) : x(y), z{y} {
    call("}");
  }
};
template <Config kConfig, int n = (2 < 3)>
__global__ void __launch_bounds__(kConfig.threads(), 1)
    kernel(const Args args) {
  auto lambda = [&](int i) {
    return i;
  };
  for (int i = 0; i < 3; ++i) {
  }
}
inline auto g() -> std::vector<int> { return {}; }
bool operator==(const S& l, const S& r) { return l.x == r.x; }
constexpr int table[] = {1, 2, int(3)};
}
"""
    expected = [(3, 7, "S"), (7, 13, "kernel"), (1, 20, "g"), (1, 21, "operator==")]
    found = list(functions(source))
    wrong = found != expected
    if wrong:
        print(f"functions: expected {expected}, got {found}")
    pairs = [("| `src/core` | 10 | 1,000 | 50 lines, `f` |", "| `src/core` | 11 | 1,090 | 54 lines, `g` |", True),
             ("| `src/core` | 10 | 1,000 | 50 lines, `f` |", "| `src/core` | 10 | 1,200 | 50 lines, `f` |", False),
             ("| `src/core` | 10 | 1,000 | 50 lines, `f` |", "| `src/tile` | 10 | 1,000 | 50 lines, `f` |", False)]
    for written, measured, same in pairs:
        if close(written, measured) != same:
            print(f"close({written!r}, {measured!r}): expected {same}")
            wrong = True
    print("house.py: " + ("wrong" if wrong else "counts as expected"))
    return wrong


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    root = pathlib.Path(sys.argv[1]).resolve()
    if len(sys.argv) == 2:
        print(tables(root), end="")
    elif sys.argv[2] == "--functions" and len(sys.argv) == 4:
        for lines, path, line, name in longest(root, "src")[:int(sys.argv[3])]:
            print(f"{lines:5}  {path}:{line}  {name}")
    elif sys.argv[2:] == ["--heads"]:
        found = list(without_head(root))
        for path in found:
            print(f"{path}: does not begin with a comment that says what the file holds")
        return bool(found)
    elif sys.argv[2:] in (["--write"], ["--check"]):
        page = root / PAGE
        before, block, after = block_of(page.read_text(encoding="utf-8"))
        if sys.argv[2] == "--write":
            page.write_text(before + BEGIN + tables(root) + END + after, encoding="utf-8")
        else:
            found = stale(block, tables(root))
            for line in found:
                print(f"{PAGE}: {line}")
            if found:
                print("python3 tools/house.py . --write writes the table anew")
            return bool(found)
    else:
        sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
