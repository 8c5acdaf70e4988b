#!/usr/bin/env python3
"""Keeps the ladder's pages true: what was measured, how long each kernel is, how far it is from the one before.

    ladder/pages.py            writes the generated blocks of the pages
    ladder/pages.py --check    writes nothing; exit status 1 when a block is not what its sources say, a kernel is longer
                               or further from the one before than allowed without a reason, or a page quotes a
                               measurement outside of these blocks
    ladder/pages.py --sizes    prints lines and distances
    ladder/pages.py --self-test

Measurements come from bench/results/ladder_*.json, which `fovea ladder --json` prints, and counters from
ladder_profile_*.json, which `make profile-ladder PROFILE_FLAGS='--json auto'` writes. In a README of a rung they stand
between `<!-- measured -->` and `<!-- end of measured -->`, in a page of docs/course between `<!-- measured: RUNG RUNG -->`
and the same end; peak bytes (`fovea ladder --memory --json`) between `<!-- peak memory: RUNG RUNG -->` and that end. A reason is a paragraph of the rung's README that begins with `Longer than 200 lines:` or `Further than 60
lines:`.
"""
import difflib
import json
import pathlib
import re
import sys
import tempfile

MOST_LINES, MOST_CHANGED = 200, 60
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench" / "gpu"))
import ncu  # noqa: E402
BLOCK = re.compile(r"(<!-- (measured|peak memory)(?:: ([\w ]+))? -->\n)(.*?)(<!-- end of measured -->)", re.DOTALL)
SIZES = re.compile(r"(<!-- sizes -->\n)(.*?)(<!-- end of sizes -->)", re.DOTALL)
QUANTITY = re.compile(r"(?<![\w.])\d[\d.,]*\s?(?:[TG]FLOP/s|[TG]B/s|ms|µs|us|ns)\b")
NOT_YET = "_Not measured in this version of the tree._\n"


def table(rows, texts=2):
    """Markdown: the first columns, which are words, to the left, the others to the right."""
    line = ["---"] * texts + ["---:"] * (len(rows[0]) - texts)
    return "".join("| " + " | ".join(cells) + " |\n" for cells in [rows[0], line, *rows[1:]])


def kernels(root):
    """[(rung, path)], in the order of the ladder."""
    return sorted((path.parent.name, path) for path in root.glob("ladder/[0-9][0-9]_*/kernel.*"))


def changed_lines(before, after):
    """Lines of `after` that are not in `before`, in order: what a reader of `before` has to read. The namespace of a rung is its name."""
    nameless = [[re.sub(r"(namespace ladder)::\w+", r"\1", line) for line in lines] for lines in (before, after)]
    matcher = difflib.SequenceMatcher(None, *nameless, autojunk=False)
    return sum(j2 - j1 for tag, _, _, j1, j2 in matcher.get_opcodes() if tag in ("replace", "insert"))


def sizes(root):
    """[(rung, lines, changed lines from the one before of its group or None)]"""
    found, before, group = [], None, None
    for rung, path in kernels(root):
        lines = path.read_text(encoding="utf-8").splitlines()
        own_group = re.sub(r"^\d+_([a-z]+).*", r"\1", rung)
        is_next = own_group == group and own_group != "side"  # those are in another language each
        found.append((rung, len(lines), changed_lines(before, lines) if is_next else None))
        before, group = lines, own_group
    return found


def results(root):
    return [json.loads(path.read_text(encoding="utf-8")) | {"file": path.name}
            for path in sorted(root.glob("bench/results/ladder_*.json"))]


def measured(root, rungs):
    """The block of these rungs: a table for each file of results that has them."""
    text = ""
    for result in results(root):
        rows = [row for row in result.get("rows", []) if row["rung"] in rungs and "median_seconds" in row]
        if not rows:
            continue
        machine = result["gpu"] if "gpu" in result and not rows[0]["rung"].startswith("0") else result["host"]
        text += f"{machine}, {result['date']} (`bench/results/{result['file']}`)\n\n"
        # Backends of the library differ from shape to shape: one column for all.
        column = lambda peer: "Fovea" if peer["name"].startswith("fovea ") else peer["name"]
        peers = list(dict.fromkeys(column(peer) for row in rows for peer in row.get("peers", [])))
        cells = [["rung", "shape", "median, ms", "spread", "rate", "of peak", "times the rung before",
                  *(f"times {peer}" for peer in peers)]]
        for row in rows:
            percent = lambda key: f"{row[key] * 100:.1f} %" if key in row else "-"
            times = lambda key: f"{row[key]:.2f}" if key in row else "-"
            cells.append([f"`{row['rung']}`", row["shape"], f"{row['median_seconds'] * 1e3:.4g}", percent("spread"),
                          f"{row['rate']:.4g} {row['unit']}", percent("share_of_peak"), times("times_the_rung_before"),
                          *shares_of(row, column, peers)])
        ours = sorted({peer["name"] for row in rows for peer in row.get("peers", []) if column(peer) == "Fovea"})
        text += table(cells) + (f"\nFovea: {', '.join(name.split()[1] for name in ours)}.\n" if ours else "") + "\n"
    return text.rstrip("\n") + "\n" if text else NOT_YET


def peak_memory(root, rungs):
    """A table for each file of peak bytes that has these rungs: a line for each length, a column for each rung and the library."""
    text = ""
    for result in results(root):
        by_length = {}
        for row in result.get("rows", []):
            if row["rung"] in rungs and "peak_bytes" in row:
                line = by_length.setdefault(row["shape"], {})
                line[row["rung"]] = row["peak_bytes"]
                if "library" in row:
                    line["Fovea"] = row["library"]["peak_bytes"]
        if not by_length:
            continue
        machine = result["gpu"] if "gpu" in result and not rungs[0].startswith("0") else result["host"]
        text += f"{machine}, {result['date']} (`bench/results/{result['file']}`); MiB\n\n"
        columns = [name for name in [*rungs, "Fovea"] if any(name in line for line in by_length.values())]
        cells = [["shape", *(f"`{name}`" if name != "Fovea" else name for name in columns)]]
        cells += [[shape, *(f"{line[name] / 2**20:,.1f}" if name in line else "-" for name in columns)]
                  for shape, line in by_length.items()]
        text += table(cells, texts=1) + "\n"
    return text.rstrip("\n") + "\n" if text else NOT_YET


def shares_of(row, column, peers):
    """How many times as fast as each of the peers."""
    shares = {column(peer): f"{peer['share']:.2f}" for peer in row.get("peers", [])}
    return [shares.get(peer, "-") for peer in peers]


COUNTERS = ("µs", "SM %", "memory %", "DRAM %", "tensor %", "issue %", "occupancy % (limit)", "L2 hit %",
            "bank conflicts (of wavefronts)", "registers", "shared, KiB", "local ld / st", "FLOP/byte")


def counters(root, rung):
    """A table for each file of counters that has the rung; nothing when none has."""
    text = ""
    for result in results(root):
        lines = [line for line in result.get("kernels", []) if line["rung"] == rung]
        if not lines:
            continue
        text += f"Counters by Nsight Compute, {result['gpu']}, {result['date']} (`bench/results/{result['file']}`)\n\n"
        cells = [["kernel", "shape", *COUNTERS]]
        for line in lines:
            kernel = ncu.Kernel(line["kernel"], {label: line[label] for label in ncu.METRICS if label in line})
            named = dict(zip(ncu.HEAD, ncu.cells(kernel)))
            cells.append([named["kernel"], line["shape"], *(named[column] for column in COUNTERS)])
        text += table(cells) + "\n"
    return text.rstrip("\n") + "\n" if text else ""


def sizes_table(root):
    rows = [["rung", "kernel", "lines", "changed from the one before"]]
    for (rung, path), (_, lines, changed) in zip(kernels(root), sizes(root)):
        rows.append([f"[{rung}]({rung}/README.md)", f"[{path.name}]({rung}/{path.name})", str(lines),
                     "-" if changed is None else str(changed)])
    return table(rows)


def pages(root):
    yield from sorted(root.glob("ladder/[0-9][0-9]_*/README.md"))
    yield from sorted(root.glob("docs/course/*.md"))


def filled(root, page):
    """The text of a page with its blocks written."""
    own = page.parent.name
    text = page.read_text(encoding="utf-8")

    def block(match):
        before, kind, names, _, after = match.groups()
        rungs = names.split() if names else [own]
        if kind == "peak memory":
            return before + peak_memory(root, rungs) + after
        found = "" if names else counters(root, own)
        return before + measured(root, rungs) + ("\n" + found if found else "") + after

    text = BLOCK.sub(block, text)
    return SIZES.sub(lambda m: m[1] + sizes_table(root) + m[3], text)


def complaints(root):
    for page in [root / "ladder/README.md", *pages(root)]:
        name = page.relative_to(root).as_posix()
        text = page.read_text(encoding="utf-8")
        if filled(root, page) != text:
            yield f"{name}: not what its sources say; run ladder/pages.py"
        for quantity in QUANTITY.findall(BLOCK.sub("", text)):
            yield f"{name}: quotes {quantity} outside of what is generated from bench/results"
        for rung in (word for m in BLOCK.finditer(text) if m[3] for word in m[3].split()):
            if not (root / "ladder" / rung).is_dir():
                yield f"{name}: there is no rung {rung}"
    for rung, lines, changed in sizes(root):
        page = root / "ladder" / rung / "README.md"
        if not page.exists():
            yield f"ladder/{rung}: has no README.md"
            continue
        text = page.read_text(encoding="utf-8")
        if "<!-- measured -->" not in text:
            yield f"ladder/{rung}/README.md: has no measured block"
        for over, limit, words in ((lines, MOST_LINES, "Longer than 200 lines:"),
                                   (changed or 0, MOST_CHANGED, "Further than 60 lines:")):
            if over > limit and words not in text:
                yield f"ladder/{rung}: {over} of {limit} lines, and its README does not say why ({words})"
            if over <= limit and words in text:
                yield f"ladder/{rung}/README.md: {words} is not so ({over})"


def self_test():
    row = {"rung": "02_cpu_b", "shape": "1x2x3", "median_seconds": 0.00125, "spread": 0.1, "rate": 2.5, "unit": "GFLOP/s",
           "peers": [{"name": "fovea cpu_x", "seconds": 0.001, "share": 0.8}, {"name": "cuX", "seconds": 0.002, "share": 1.6}]}
    weighed = {"rung": "02_cpu_b", "shape": "1x2x3", "peak_bytes": 3 * 2**19, "library": {"name": "fovea x", "peak_bytes": 2**20}}
    kernel = {"rung": "02_cpu_b", "shape": "1x2x3", "kernel": "multiply", "duration_ns": 1250.0, "registers": 77}
    readme = "# B\n\n<!-- measured -->\n<!-- end of measured -->\n"
    long_kernel = "".join(f"line {i};\n" for i in range(230))
    cases = [  # what is changed, words of the complaint or None
        ({}, None),
        ({"ladder/02_cpu_b/README.md": readme}, "not what its sources say"),
        ({"ladder/02_cpu_b/README.md": None}, "has no README"),
        ({"ladder/02_cpu_b/kernel.cpp": long_kernel}, "does not say why (Longer"),
        ({"ladder/02_cpu_b/kernel.cpp": long_kernel[:1000]}, "does not say why (Further"),
        ({"docs/course/a.md": "It takes 3.5 ms.\n"}, "quotes 3.5 ms"),
        ({"docs/course/a.md": "<!-- measured: 09_none -->\n" + NOT_YET + "<!-- end of measured -->\n"}, "no rung 09_none"),
    ]
    wrong = 0
    for changes, expected in cases:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            files = {"bench/results/ladder_x.json": json.dumps({"host": "a machine", "date": "2026-01-01", "rows": [row]}),
                     "bench/results/ladder_memory_x.json": json.dumps({"host": "a host", "date": "2026-01-03", "rows": [weighed]}),
                     "bench/results/ladder_profile_x.json": json.dumps({"gpu": "a GPU", "date": "2026-01-02", "kernels": [kernel]}),
                     "ladder/README.md": "# Ladder\n", "ladder/01_cpu_a/README.md": readme, "ladder/01_cpu_a/kernel.cpp": "a;\n",
                     "ladder/02_cpu_b/README.md": readme, "ladder/02_cpu_b/kernel.cpp": "b;\n", "docs/course/a.md": "# A\n<!-- peak memory: 01_cpu_a 02_cpu_b -->\n<!-- end of measured -->\n"}
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            for page in pages(root):
                page.write_text(filled(root, page), encoding="utf-8")
            page = (root / "ladder/02_cpu_b/README.md").read_text(encoding="utf-8")
            for words in ("| 1.25 | 10.0 % | 2.5 GFLOP/s | - | - | 0.80 | 1.60 |", "times Fovea | times cuX |", "Fovea: cpu_x.",
                          "| `multiply` | 1x2x3 | 1.2 |", "a GPU, 2026-01-02"):
                if words not in page:
                    print(f"not on the page of the rung: {words}")
                    wrong += 1
            if "| 1x2x3 | 1.5 | 1.0 |" not in (root / "docs/course/a.md").read_text(encoding="utf-8"):
                print("the peak bytes are not on their page")
                wrong += 1
            for name, text in changes.items():
                (root / name).unlink() if text is None else (root / name).write_text(text, encoding="utf-8")
            found = list(complaints(root))
            if (len(found) > 0) != (expected is not None) or (expected and not any(expected in line for line in found)):
                print(f"expected {expected!r}, got {found}")
                wrong += 1
    if changed_lines(list("abcd"), list("axcde")) != 2:
        print("changed_lines counts wrongly")
        wrong += 1
    print(f"{len(cases) + 1} cases, {wrong} wrong")
    return 1 if wrong else 0


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if sys.argv[1:] == ["--sizes"]:
        print(f"{'rung':32}{'lines':>6}{'changed':>9}")
        for rung, lines, changed in sizes(ROOT):
            marks = " longer" * (lines > MOST_LINES) + " further" * ((changed or 0) > MOST_CHANGED)
            print(f"{rung:32}{lines:6}{'-' if changed is None else changed:>9}{marks}")
        return 0
    if sys.argv[1:] == ["--check"]:
        found = list(complaints(ROOT))
        for line in found:
            print(line)
        return 1 if found else 0
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    for page in [ROOT / "ladder/README.md", *pages(ROOT)]:
        page.write_text(filled(ROOT, page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
