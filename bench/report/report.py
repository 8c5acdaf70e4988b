"""One HTML page from files of results: what `fovea report` and `make report` run.

    python3 bench/report/report.py                                the files in bench/results, as report.html
    python3 bench/report/report.py FILE FOLDER ... --output PAGE  others: what --json of fovea ladder and of bench/*/*.py wrote

The page holds everything it shows: it needs no network, follows the reader's choice of light or dark, and fits a phone.
Needs Plotly and Jinja2 (tools/requirements-report.txt).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "gpu"))  # in an installation tables.py lies beside this file
import data  # noqa: E402
import tables  # noqa: E402
from data import Results, Row  # noqa: E402

PAGE = HERE / "page"
RESOURCES = HERE.parent.parent / "docs" / "kernels" / "resources.md"
# Exit codes are those of the program `fovea`.
USAGE, INPUT, OUTPUT, MISSING = 2, 3, 5, 6


@dataclass
class Picture:
    """A figure of Plotly and what it shows."""

    title: str
    figure: str  # JSON
    note: str = ""
    small: bool = False  # one of many beside each other, which share a legend
    legend: list[tuple[str, str]] = field(default_factory=list)  # name, colour


@dataclass
class Table:
    head: list[str]
    rows: list[list[str]]
    title: str = ""
    folded: bool = False

    @property
    def texts(self) -> list[bool]:
        """Of each column, whether it holds words rather than numbers."""
        return [any(row[i][:1].isalpha() or row[i][:3].strip("0123456789").startswith(("_", "x")) for row in self.rows)
                for i in range(len(self.head))]  # fmt: skip


@dataclass
class Block:
    """What one file says in a section."""

    title: str
    source: str
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)  # name, colour
    note: str = ""


@dataclass
class Section:
    name: str
    title: str
    text: str
    blocks: list[Block]


def charts() -> Any:
    import charts

    return charts


def source(result: Row) -> str:
    return f"{result['date']} · {result['file']}"


def picture(title: str, figure: Any, note: str = "", small: bool = False) -> Picture:
    legend = [] if small else [(trace.name, color_of(trace)) for trace in figure.data if trace.name]
    # "<" would end the element of the page that holds it.
    return Picture(title, figure.to_json().replace("<", "\\u003c"), note, small, legend)


def color_of(trace: Any) -> str:
    """The colour of a trace, of its first bar where bars have several."""
    color = trace.marker.color if trace.type == "bar" or trace.mode == "markers" else trace.line.color
    return str(color if isinstance(color, str) else color[0])


# ---- sections


def ladder_blocks(results: Results) -> Iterator[Block]:
    for result in results.ladder:
        for group, shapes in data.group_rows(data.timed(result)).items():
            machine = data.machine_of_group(result, group == "cpu")
            block = Block(data.GROUPS.get(group, group), f"{machine} · {source(result)}")
            many = len(shapes) > 2
            shown = sorted(shapes, key=data.length_of)[len(shapes) // 2 :][:1] if many else list(shapes)
            for shape in shown:
                block.pictures.append(picture(data.shape_words(group, shape), charts().ladder_bars(shapes[shape])))
            if many:
                block.pictures.append(picture("Over the length", charts().ladder_lengths(shapes)))
            block.tables.append(ladder_table([row for rows in shapes.values() for row in rows]))
            yield block


def ladder_table(rows: list[Row]) -> Table:
    peers = list(dict.fromkeys(peer["name"] for row in rows for peer in row.get("peers", [])))
    turned = {peer["name"] for row in rows for peer in row.get("peers", []) if data.rate_in_turns(row, peer) is not None}
    head = ["rung", "shape", "median", "spread", "rate", "of peak", "of the rung before",
            *(f"of {peer}" + (", in turns" if peer in turned else "") for peer in peers)]  # fmt: skip
    body = []
    for row in rows:
        shares = {peer["name"]: f"{peer['share']:.2f}×" for peer in row.get("peers", [])}
        before = row.get("times_the_rung_before")
        body.append([
            row["rung"], row["shape"], charts().seconds_text(row["median_seconds"]), f"{row['spread']:.1%}",
            f"{row['rate']:,.4g} {row['unit']}", f"{row['share_of_peak']:.1%}" if "share_of_peak" in row else "-",
            f"{before:.2f}×" if before else "-", *(shares.get(peer, "-") for peer in peers),
        ])  # fmt: skip
    return Table(head, body, "All rungs and shapes", folded=True)


def roofline_blocks(results: Results) -> Iterator[Block]:
    for result in results.ladder:
        for on_cpu in (True, False):
            chip = data.chip_of(result)
            counted: list[Row] = []
            library: list[Row] = []
            used = [result]
            if not on_cpu:
                groups = {row["group"] for row in result["rows"]}
                for found in results.profile:
                    lines = [line for line in found["kernels"] if line["group"] in groups]
                    if lines and data.chip_of(found) == chip:
                        counted += lines
                        used.append(found)
                for found in results.gpu:
                    rows = data.rows_like(found, result)
                    if rows and data.chip_of(found) == chip:
                        library += rows
                        used.append(found)
            figure = charts().roofline(result, on_cpu, counted, library)
            if figure is not None:
                files = " · ".join(found["file"] for found in used)
                block = Block(data.machine_of_group(result, on_cpu), f"{result['date']} · {files}")
                block.pictures.append(picture("Roofline", figure))
                yield block


def speed_blocks(results: Results) -> Iterator[Block]:
    for result in results.gpu:
        block = Block(data.machine_of(result), source(result))
        grid = [row for row in result["rows"] if row["group"] == "grid"]
        names = tables.contenders_of(grid)
        block.legend = [(charts().contender_name(name), charts().contender_color(name)) for name in names]
        cells: dict[tuple[Any, ...], list[Row]] = {}
        for row in grid:
            cells.setdefault((row["dtype"], row["pass"], row["d"], row["causal"]), []).append(row)
        for (dtype, pass_, d, causal), rows in cells.items():
            title = f"{tables.PASS_NAMES[pass_]}, {dtype}, d {d}" + (", causal" if causal else "")
            block.pictures.append(picture(title, charts().bench_lengths(rows, names), small=True))
        summary = tables.summary_rows(result)
        if summary:
            head = ["type", "pass", "Fovea over", "cells", "geometric mean", "least", "most"]
            block.tables.append(Table(head, summary, "Times as fast as each peer"))
        others = [row for row in result["rows"] if row["group"] != "grid"]
        if others:
            block.tables.append(other_rows(others))
        yield block
    for result in results.cpu:
        block = Block(data.machine_of(result), source(result), note="Dotted: causal. One batch entry, 8 or 16 heads.")
        block.legend = [("Fovea", charts().OURS), ("PyTorch", charts().ORANGE)]
        cells = {}
        for row in result["rows"]:
            if row["b"] == 1:
                cells.setdefault((row["dtype"], row["pass"], row["d"]), []).append(row)
        for (dtype, pass_, d), rows in cells.items():
            title = f"{tables.PASS_NAMES[pass_]}, {dtype}, d {d}"
            block.pictures.append(picture(title, charts().cpu_lengths(rows), small=True))
        means = [[name.replace("_", " "), str(mean["rows"]), f"{mean['geometric_mean']:.2f}", f"{mean['min']:.2f}"]
                 for name, mean in result.get("means", {}).items()]  # fmt: skip
        if means:
            block.tables.append(Table(["rows", "count", "geometric mean", "least"], means, "Times as fast as PyTorch"))
        decode = [[row["name"], f"{row['ms']:.2f} ms", f"{row['read_gb_s']:.1f} GB/s", f"{row['share_of_read']:.0%}"]
                  for row in result.get("decode", [])]  # fmt: skip
        if decode:
            block.tables.append(Table(["row", "time", "plain read", "share of it"], decode, "Decoding, beside a read of memory"))
        yield block


def other_rows(rows: list[Row]) -> Table:
    names = tables.contenders_of(rows)
    body = []
    for row in rows:
        best = tables.best_ratio(row, "ours")
        times = [tables.milliseconds(row, name) for name in names]
        body.append([row["name"], *("-" if time is None else f"{time:.3f}" for time in times),
                     "-" if best is None else f"{best:.2f}×"])  # fmt: skip
    head = ["row", *(f"{charts().contender_name(name)}, ms" for name in names), "of the best peer"]
    return Table(head, body, "Rows outside of the grid", folded=True)


def memory_blocks(results: Results) -> Iterator[Block]:
    for result in results.memory:
        groups: dict[str, list[Row]] = {}
        for row in result["rows"]:
            if "peak_bytes" in row and row["group"] not in ("matmul", "softmax"):
                groups.setdefault(row["group"], []).append(row)
        for group, rows in groups.items():
            batch, _, size = rows[0]["shape"].split("x")
            machine = data.machine_of_group(result, group == "cpu")
            block = Block(data.GROUPS.get(group, group), f"{machine} · {source(result)}")
            title = f"{'One head' if batch == '1' else f'{batch} heads'} of size {size}, {rows[0]['dtype']}"
            block.pictures.append(picture(title, charts().memory(rows), memory_words(rows)))
            body = [[row["rung"], f"{data.length_of(row['shape']):,}", charts().bytes_text(row["peak_bytes"]),
                     charts().bytes_text(row["library"]["peak_bytes"]) if "library" in row else "-"] for row in rows]  # fmt: skip
            block.tables.append(Table(["rung", "length", "peak", "Fovea"], body, "All rungs and lengths", folded=True))
            yield block


def memory_words(rows: list[Row]) -> str:
    """The most over the least at the longest length that both have."""
    longest = max(data.length_of(row["shape"]) for row in rows)
    there = {row["rung"]: row["peak_bytes"] for row in rows if data.length_of(row["shape"]) == longest}
    most, least = max(there, key=lambda rung: there[rung]), min(there, key=lambda rung: there[rung])
    if there[most] < 2 * there[least]:
        return ""
    text = charts().bytes_text
    return (f"At length {longest:,}, {most} holds {text(there[most])} and {least} {text(there[least])}: "
            f"{there[most] / there[least]:.0f} times less.")  # fmt: skip


def kernel_blocks(results: Results, resources: str | None) -> Iterator[Block]:
    for result in results.profile:
        head = ["rung", "kernel", "shape", "µs", "registers", "shared, KiB", "threads", "occupancy (limit)", "tensor", "DRAM",
                "issue", "local loads / stores"]  # fmt: skip
        body = [profile_cells(line) for line in result["kernels"]]
        block = Block(data.machine_of(result), source(result), note=f"Nsight Compute, {result['profiler']}.")
        block.tables.append(Table(head, body, "Counters of the rungs"))
        yield block
    if resources:
        block = Block("The library, by the compiler's report", f"{data.compiler(resources)} · docs/kernels/resources.md")
        block.note = ("Under an architecture: registers a thread, then how many blocks fit one SM and what limits them: registers (r), "
                      "shared memory (s), warps (w) or slots (c). PTX: compiled by the driver. A dash: more shared memory than there "
                      "is. Shared memory in bytes.")  # fmt: skip
        for family, table in data.resources(resources):
            block.tables.append(Table(table[0], table[1:], f"{family} ({len(table) - 1})", folded=True))
        if block.tables:
            yield block


def profile_cells(line: Row) -> list[str]:
    def number(key: str, form: str = ",.0f", size: float = 1) -> str:
        return format(line[key] / size, form) if key in line else "-"

    def percent(key: str) -> str:
        return f"{line[key]:.0f} %" if key in line else "-"

    return [
        line["rung"], line["kernel"], line["shape"], number("duration_ns", ",.1f", 1e3), number("registers"),
        number("shared_bytes", ".1f", 1024), number("block"), f"{percent('occupancy_pct')} ({percent('occupancy_limit_pct')})",
        percent("tensor_pct"), percent("dram_pct"), percent("issue_pct"), f"{number('local_loads')} / {number('local_stores')}",
    ]  # fmt: skip


def python_blocks(results: Results) -> Iterator[Block]:
    for result in results.python:
        note = f"Python {result['python']}, PyTorch {result['pytorch']}. The time of a call of a tiny problem."
        block = Block(data.machine_of(result), source(result), note=note)
        block.pictures.append(picture("Calls from Python", charts().python_calls(result)))
        yield block


def rank_blocks(results: Results) -> Iterator[Block]:
    for result in results.ranks:
        passes = list(dict.fromkeys(name for row in result["rows"] for name in row["passes"]))
        head = ["row", "method", *(f"{pass_}{of}" for pass_ in passes for of in (", ms", "", ", PyTorch"))]
        body = [[row["row"], row["method"], *(cell for pass_ in passes for cell in rank_cells(row["passes"].get(pass_, {})))]
                for row in result["rows"]]  # fmt: skip
        note = f"{result['ranks']} GPUs, {result['type']}, size {result['head_dim']}{', causal' if result['causal'] else ''}."
        block = Block(data.machine_of(result), source(result), note=note)
        block.tables.append(Table(head, body, "Share of one GPU's rate that each GPU keeps"))
        yield block


def rank_cells(times: Row) -> list[str]:
    """Of one pass: Fovea's time and share, the share of PyTorch's context parallelism."""
    ours, pytorch = times.get("fovea"), times.get("pytorch")
    return [f"{ours['ms']:.3f}" if ours else "-", *(f"{timed['share']:.2f}" if timed else "-" for timed in (ours, pytorch))]


def sections(results: Results, resources: str | None) -> list[Section]:
    """Those that have something to show."""
    found = [
        Section("ladder", "The ladder", "Each rung changes one idea of the rung before, solves the same problem, and is checked "
                "against float64 before it is timed: alone, and on GPUs again in turns with the library, as a GPU's clock falls under "
                "load. Rates of the same turns can be compared with each other.", list(ladder_blocks(results))),
        Section("rooflines", "Rooflines", "What the chip allows at each number of operations for a byte of memory. Circles: operations "
                "and bytes that the problem needs at least; diamonds: those that the counters saw.",
                list(roofline_blocks(results))),
        Section("speed", "Speed against length", "The library beside its peers, on the same tensors, in turns.",
                list(speed_blocks(results))),
        Section("ranks", "One problem over several GPUs", "The same problem on one GPU and on several, in turns.",
                list(rank_blocks(results))),
        Section("memory", "Memory against length", "The most bytes that the tensors, the workspace and one run held at a time, as the "
                "system told. Red: what keeps the matrix of scores.", list(memory_blocks(results))),
        Section("kernels", "Registers, shared memory, occupancy", "What each kernel takes of a streaming multiprocessor.",
                list(kernel_blocks(results, resources))),
        Section("python", "Calls from Python", "What a call costs beside the computation.", list(python_blocks(results))),
    ]  # fmt: skip
    return [section for section in found if section.blocks]


def highlights(results: Results) -> list[tuple[str, str]]:
    """A few numbers and what they are, from the files."""
    found: list[tuple[str, str]] = []
    for result in results.gpu:
        of_peer = {(dtype, pass_): (opponent, mean) for dtype, pass_, opponent, _, mean, *_ in tables.summary_rows(result)}
        for (dtype, pass_), (opponent, mean) in of_peer.items():  # the last is the best of them, where there are several
            peer = opponent.replace("the best of them", "the best peer")
            found.append((f"{mean}×", f"as fast as {peer}: {pass_}, {dtype}, {data.chip_of(result)}"))
    for result in results.cpu:
        for name in ("float32_fwd", "bfloat16_fwd"):
            if mean := result.get("means", {}).get(name):
                words = f"as fast as PyTorch: forward, {name.split('_')[0]}, {data.machine_of(result)}"
                found.append((f"{mean['geometric_mean']:.2f}×", words))
    for result in results.ladder:
        for group, shapes in data.group_rows(data.timed(result)).items():
            rows = list(shapes.values())[-1]
            if group in ("cpu", "attention") and len(rows) > 1:
                gain = rows[0]["median_seconds"] / rows[-1]["median_seconds"]
                found.append((f"{gain:,.3g}×", f"as fast as {rows[0]['rung']}: {rows[-1]['rung']}, "
                                               f"{data.machine_of_group(result, group == 'cpu').split(',')[0]}"))  # fmt: skip
            if share := peer_share(shapes):
                found.append((f"{share[0]:.2f}×", f"as fast as {share[1]}: {rows[-1]['rung']}, {data.chip_of(result)}"))
    less = [(gain, words) for result in results.memory for gain, words in [least_memory(result)] if gain >= 2]
    found += [(f"{gain:.0f}×", words) for gain, words in less]
    return found


def peer_share(shapes: dict[str, list[Row]]) -> tuple[float, str] | None:
    """Of a group that is timed over the lengths: the last rung against FlashAttention-2, the geometric mean."""
    if len(shapes) < 3:
        return None
    shares = [(peer["share"], peer["name"]) for rows in shapes.values() for peer in rows[-1].get("peers", [])
              if peer["name"] == "FlashAttention-2"]  # fmt: skip
    return (tables.geometric_mean(share for share, _ in shares), shares[0][1]) if shares else None


def least_memory(result: Row) -> tuple[float, str]:
    """How many times less memory the library holds than the rung of its group that holds the most, at one length."""
    rows = [row for row in result["rows"] if "peak_bytes" in row and "library" in row]
    best = max(rows, key=lambda row: row["peak_bytes"] / row["library"]["peak_bytes"], default=None)
    if best is None:
        return 0, ""
    words = f"less memory than {best['rung']} at length {data.length_of(best['shape']):,}: the library"
    return best["peak_bytes"] / best["library"]["peak_bytes"], words


def rendered(results: Results, resources: str | None, title: str) -> str:
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    files = [{"name": result["file"], "machine": data.machine_of(result), "date": result["date"],
              "version": data.version_of(result), "protocol": protocol_of(result)} for result in results.all()]  # fmt: skip
    return environment.get_template("page.html").render(
        title=title,
        sections=sections(results, resources),
        highlights=highlights(results),
        files=files,
        made=datetime.date.today().isoformat(),
        style=(PAGE / "page.css").read_text(encoding="utf-8"),
        script=(PAGE / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
    )


def protocol_of(result: Row) -> str:
    protocol = result.get("protocol")
    if isinstance(peers := result.get("peers"), dict):
        versions = ", ".join(f"{name} {version}" for name, version in peers["software"].items() if version)
        return f"{protocol}; peers by {versions}, {peers['date']}"
    if isinstance(protocol, dict):
        return f"{protocol.get('rounds', '?')} rounds; {protocol.get('turn', '')}"
    return str(protocol or result.get("ratio") or (f"{result['rounds']} rounds" if "rounds" in result else ""))


def write_whole(path: Path, text: str) -> None:
    """Complete or not at all: a run that is cut short leaves an old page as it is."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(text)
    try:
        os.chmod(file.name, 0o666 & ~current_umask())
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def default_paths() -> list[Path]:
    return [HERE.parent / "results"] if (HERE.parent / "results").is_dir() else []


def fail(code: int, message: str) -> int:
    print(f"fovea report: {message}", file=sys.stderr)
    return code


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser("fovea report", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("results", nargs="*", type=Path, metavar="FILE", help="files of results, or folders of them")
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="PAGE", help="the page (report.html)")
    parser.add_argument("--title", default="Fovea, measured", metavar="TEXT", help="of the page")
    args = parser.parse_args(None if arguments is None else list(arguments))
    paths = args.results or default_paths()
    if not paths:
        return fail(USAGE, "no files of results are named, and none lie beside this program; give FILE, such as what "
                           "fovea ladder --json printed")  # fmt: skip
    if not args.output.suffix == ".html":
        return fail(USAGE, f"--output: got {args.output}, expected a name that ends in .html")
    try:
        import jinja2  # noqa: F401
        import plotly  # noqa: F401
    except ImportError as error:
        return fail(MISSING, f"{error}; the page is made with Plotly and Jinja2: pip install plotly jinja2, or `make report`, "
                             "which does")  # fmt: skip
    try:
        results = data.read(paths)
        if not results.all():
            return fail(INPUT, f"no file of results in {', '.join(map(str, paths))}")
        resources = RESOURCES.read_text(encoding="utf-8") if RESOURCES.is_file() else None
        try:
            text = rendered(results, resources, args.title)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            return fail(INPUT, f"a file of results lacks what its kind has ({type(error).__name__}: {error}); write it again with "
                               "this version")  # fmt: skip
    except data.WrongFile as error:
        return fail(INPUT, str(error))
    try:
        write_whole(args.output, text)
    except OSError as error:
        return fail(OUTPUT, f"{args.output}: {error.strerror}")
    print(f"wrote {args.output}: {len(results.all())} files of results, {len(text) / 1e6:.1f} MB")
    for path in results.left_out:
        print(f"left out {path}: of no kind that is drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
