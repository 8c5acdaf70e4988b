"""The pictures of `fovea report`, by Plotly. Colours of text, grid and paper are the page's (page/page.css)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import data
import plotly.graph_objects as go
import tables
from data import Row

# Near Okabe and Ito's colours, which people with any kind of colour vision tell apart; all stand out on white and on black.
# The library is blue everywhere, rungs of the ladder are green, others take the rest in turn.
OURS, RUNG, ORANGE, PINK, RED, SKY, VIOLET = "#2f7fd0", "#0b9a6d", "#e69f00", "#cc79a7", "#d9622b", "#56b4e9", "#8566cf"
GREY, LIGHT_RUNG, PEAK = "#8a8f98", "rgba(11,154,109,0.5)", "rgba(138,143,152,0.35)"
OTHERS = (ORANGE, PINK, SKY, RED, VIOLET)
CONTENDERS = {"ours": OURS, "fa2": ORANGE, "cudnn": RUNG, "fa3": RED, "fa4": PINK, "efficient": SKY}
# Bounds as fovea ladder names them, short enough for the axis of a phone.
BOUNDS = {
    "multiply-adds of all processors": "peak",
    "multiply-adds of all CUDA cores": "peak, CUDA cores",
    "tensor cores, tf32": "peak, tf32",
    "tensor cores, bf16": "peak, bf16",
    "memory, copied": "a copy",
}
LENGTHS = [2**n for n in range(6, 21)]


def figure(height: int, x: str = "", y: str = "") -> go.Figure:
    """An empty picture: transparent, and no zooming, so that a finger on it scrolls the page. The page has the legend."""
    found = go.Figure()
    axis = {"fixedrange": True, "automargin": True, "gridcolor": GREY, "zerolinecolor": GREY, "linecolor": GREY, "tickangle": 0}
    found.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 12, "t": 8, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": GREY},
        dragmode=False,
        showlegend=False,
        xaxis=axis | ({"title": {"text": x, "standoff": 8}} if x else {}),
        yaxis=axis | ({"title": {"text": y, "standoff": 8}} if y else {}),
    )
    return found


def log_axis(found: go.Figure, which: str, ticks: Sequence[float], texts: Sequence[str] | None = None) -> None:
    found.update_layout({f"{which}axis": {
        "type": "log", "tickmode": "array", "tickvals": list(ticks), "ticktext": list(texts or map(short, ticks)),
    }})  # fmt: skip


def short(value: float) -> str:
    """1536 as 1.5k, 16384 as 16k: lengths in powers of two, and other numbers in three digits."""
    if value >= 1024 and math.log2(value).is_integer():
        return f"{value / 1024:g}k" if value < 2**20 else f"{value / 2**20:g}M"
    return three_digits(value)


def three_digits(value: float) -> str:
    """Without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    raise AssertionError


def seconds_text(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def scaled(rates: Iterable[float], unit: str) -> tuple[float, str]:
    """What rates in GFLOP/s or GB/s are divided by, and the unit then."""
    return (1e3, unit.replace("G", "T", 1)) if max(rates, default=0) >= 1000 else (1.0, unit)


def length_axis(found: go.Figure, lengths: Iterable[int]) -> None:
    there = sorted(set(lengths))
    log_axis(found, "x", [n for n in LENGTHS if there[0] <= n <= there[-1]] or there)


# ---- the ladder


def ladder_bars(rows: list[Row]) -> go.Figure:
    """Rungs of one group at one shape as bars, below them the peers and the peak. Where the library took turns with the rungs,
    two thin bars under each rung are the rates of rung and library in the same turns."""
    unit = rows[0]["unit"]
    peaks = {row["bound"]: peak for row in rows if (peak := data.peak_rate(row))}
    divisor, unit = scaled([row["rate"] for row in rows] + list(peaks.values()), unit)
    turns = turn_bars(rows, divisor, unit)
    names = [row["rung"] for row in rows]
    rates = [row["rate"] / divisor for row in rows]
    colors = [RUNG] * len(rows)
    texts = [rate_text(row["rate"] / divisor, row.get("share_of_peak")) for row in rows]
    hovers = [rung_hover(row) for row in rows]
    below = [
        (peer["name"], data.peer_rate(rows[-1], peer), OURS if is_library(peer) else ORANGE, seconds_text(peer["seconds"]))
        for peer in rows[-1].get("peers", [])
        if not (turns and is_library(peer))
    ]
    below += [(BOUNDS.get(bound, "peak"), rate, PEAK, bound) for bound, rate in peaks.items()]
    for name, rate, color, words in below:
        names.append(in_lines(name))
        rates.append(rate / divisor)
        colors.append(color)
        texts.append(rate_text(rate / divisor))
        hovers.append(f"<b>{name}</b><br>{words}<br>{rate / divisor:.4g} {unit}")
    found = figure(54 + 26 * len(names) + (18 * len(rows) if turns else 0), x=unit)
    found.add_bar(x=rates, y=names, orientation="h", marker={"color": colors}, text=texts, textposition="outside",
                  cliponaxis=False, hovertext=hovers, hoverinfo="text")  # fmt: skip
    if turns:
        found.data[0].update(name="rung, alone", width=[0.5] * len(names), offset=[-0.45] * len(rows) + [-0.25] * len(below))
        for bars in turns:
            found.add_bar(orientation="h", cliponaxis=False, hoverinfo="text", **bars)
    found.update_layout(bargap=0.25)
    found.update_yaxes(autorange="reversed", showgrid=False, tickfont={"size": 11})
    longest = max(x for bar in found.data for x in bar.x if x is not None)
    found.update_xaxes(range=[0, longest * 1.22], nticks=4)
    return found


def turn_bars(rows: list[Row], divisor: float, unit: str) -> list[dict[str, Any]]:
    """Of a figure of bars: the rungs and the library in the same turns, as two thin bars under each rung's own; none where they
    took no turns."""
    pairs = [(row, peer, data.rate_in_turns(row, peer)) for row in rows if (peer := data.library_peer(row)) is not None]
    if not any(rate for _, _, rate in pairs):
        return []
    names = [row["rung"] for row, _, _ in pairs]
    rungs = [None if rate is None else rate / divisor for _, _, rate in pairs]
    library = [data.peer_rate(row, peer) / divisor for row, peer, _ in pairs]
    hovers = [
        f"<b>{row['rung']}</b>" + (f" in turns: {rung:.4g} {unit}" if rung else "") + f"<br><b>{peer['name']}</b>"
        f"{' in the same turns' if rung else ''}: {fovea:.4g} {unit}<br>{peer['share']:.2f} times as fast as the library"
        for (row, peer, _), rung, fovea in zip(pairs, rungs, library, strict=True)
    ]
    texts = [f"{peer['share']:.2f}×" for _, peer, _ in pairs]
    one: dict[str, Any] = {"y": names, "width": 0.14, "hovertext": hovers}
    return [
        one | {"name": "rung, in turns with the library", "x": rungs, "offset": 0.1, "marker": {"color": LIGHT_RUNG}},
        one | {"name": "the library, in the same turns; rung ÷ library", "x": library, "offset": 0.26, "marker": {"color": OURS},
               "text": texts, "textposition": "outside", "constraintext": "none", "textfont": {"size": 9}},
    ]  # fmt: skip


def rate_text(rate: float, share: float | None = None) -> str:
    return three_digits(rate) + (f" · {share:.0%}" if share is not None and share >= 0.01 else "")


def rung_hover(row: Row) -> str:
    lines = [f"<b>{row['rung']}</b>, {row['shape']}", f"{seconds_text(row['median_seconds'])}, spread {row['spread']:.1%}"]
    if "share_of_peak" in row:
        lines.append(f"{row['share_of_peak']:.1%} of the peak ({row['bound']})")
    if "times_the_rung_before" in row:
        lines.append(f"{row['times_the_rung_before']:.2f} times as fast as the rung before")
    lines += [f"{peer['share']:.2f} times as fast as {peer['name']}" for peer in row.get("peers", [])]
    return "<br>".join(lines)


def lines_of(name: str) -> list[str]:
    """A name for an axis: where it would take much of a phone's width, in several lines, broken behind spaces and the dots of modules."""
    most, lines = 28, [""]
    for piece in re.split(r"(?<= )|(?<=\.)(?=[A-Za-z_])", name):
        if lines[-1] and len((lines[-1] + piece).rstrip()) > most:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def in_lines(name: str) -> str:
    return "<br>".join(lines_of(name))


def is_library(peer: Row) -> bool:
    return str(peer["name"]).startswith("fovea ")


def ramp(index: int, count: int) -> str:
    """From grey to the green of the last rung."""
    share = index / (count - 1) if count > 1 else 1.0
    first, last = (0xB4, 0xBC, 0xC4), (0x0B, 0x9A, 0x6D)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(first, last, strict=True))


def ladder_lengths(shapes: dict[str, list[Row]]) -> go.Figure:
    """Rungs of one group over the lengths, and their peers."""
    rows = [row for here in shapes.values() for row in here]
    divisor, unit = scaled([row["rate"] for row in rows], rows[0]["unit"])
    found = figure(340, x="length", y=unit)
    rungs = list(dict.fromkeys(row["rung"] for row in rows))
    for index, rung in enumerate(rungs):
        points = sorted((data.length_of(row["shape"]), row["rate"] / divisor) for row in rows if row["rung"] == rung)
        found.add_scatter(x=[x for x, _ in points], y=[y for _, y in points], name=rung, mode="lines+markers",
                          line={"color": ramp(index, len(rungs)), "width": 2})  # fmt: skip
    # Beside the last rung: its peers, and its own rates in its turns with the library.
    others: list[str] = []
    lines: dict[str, tuple[str, dict[int, float]]] = {}
    for last in (here[-1] for here in shapes.values()):
        for peer in last.get("peers", []):
            name, color = peer["name"], OURS
            beside = data.rate_in_turns(last, peer) if is_library(peer) else None
            if is_library(peer):
                name = "Fovea" if beside is None else "Fovea, in the same turns"
            else:
                others += [name] if name not in others else []
                color = OTHERS[others.index(name) % len(OTHERS)]
            here = [(name, color, data.peer_rate(last, peer))]
            if beside is not None:
                here.insert(0, (f"{last['rung']}, in turns with Fovea", ramp(1, 1), beside))
            for line, color, rate in here:
                lines.setdefault(line, (color, {}))[1][data.length_of(last["shape"])] = rate / divisor
    for name, (color, by_length) in lines.items():
        points = sorted(by_length.items())
        found.add_scatter(x=[x for x, _ in points], y=[y for _, y in points], name=name, mode="lines+markers",
                          line={"color": color, "width": 3, "dash": "dot"})  # fmt: skip
    length_axis(found, (data.length_of(row["shape"]) for row in rows))
    found.update_yaxes(rangemode="tozero")
    return found


# ---- rooflines


def roofline(result: Row, on_cpu: bool, profile: list[Row], library: list[Row]) -> go.Figure | None:
    """Of one chip: its ceilings, the rungs, kernels by their counters (`profile`), and rows of bench/gpu/compare.py with the library.
    None where no ceiling is known."""
    peaks = [peak for peak in result.get("peaks", []) if (peak["where"] == "cpu") == on_cpu]
    ceilings = {peak["bound"]: peak["rate"] for peak in peaks if peak["unit"] == "GFLOP/s"}
    bandwidth = next((peak["rate"] for peak in peaks if peak["unit"] == "GB/s"), None)
    if not ceilings or bandwidth is None:
        return None
    groups: dict[str, list[tuple[float, float, str]]] = {}
    for row in data.timed(result):
        if data.is_on_cpu(row) == on_cpu and "flops" in row:
            rate = row["flops"] / row["median_seconds"] * 1e-9
            text = f"{row['rung']}, {row['shape']}"
            groups.setdefault(row["group"], []).append((row["flops"] / row["bytes"], rate, text))
    for row in library:
        entry = row["contenders"].get("ours", {})
        if "ms" in entry:
            point = (row["flops"] / row["bytes"], row["flops"] / entry["ms"] * 1e-6, row["name"])
            groups.setdefault("Fovea", []).append(point)
    counted = [
        (line["intensity"], line["flop"] / line["duration_ns"], f"{line['rung']}: {line['kernel']}")
        for line in profile
        if line.get("flop", 0) > 0 and "intensity" in line
    ]
    if counted:
        groups["by counters"] = counted
    points = [point for found in groups.values() for point in found]
    if not points:
        return None
    top = max(ceilings.values())
    left = min(min(x for x, _, _ in points), min(ceilings.values()) / bandwidth) / 4
    right = max(max(x for x, _, _ in points), top / bandwidth) * 2
    divisor, unit = scaled([top], "GFLOP/s")
    found = figure(400, x="operations for each byte", y=unit)
    for index, (bound, rate) in enumerate(sorted(ceilings.items(), key=lambda item: item[1])):
        ridge = rate / bandwidth
        is_top = index == len(ceilings) - 1
        xs = ([left] if is_top else []) + [ridge, right]
        ys = [y / divisor for y in ([left * bandwidth] if is_top else []) + [rate, rate]]
        found.add_scatter(x=xs, y=ys, mode="lines", line={"color": GREY, "width": 2 if is_top else 1.5, "dash": "solid" if is_top
                          else "dash"}, hoverinfo="text",
                          hovertext=f"{bound}: {three_digits(rate / divisor)} {unit}")  # fmt: skip
        found.add_annotation(x=math.log10(right), y=math.log10(rate / divisor), showarrow=False,
                             text=f"{bound}: {three_digits(rate / divisor)} {unit}",
                             xanchor="right", yanchor="bottom", font={"size": 10})  # fmt: skip
    found.add_annotation(x=math.log10(left), y=math.log10(left * bandwidth / divisor), text=f"memory: {bandwidth:,.0f} GB/s",
                         showarrow=False, xanchor="left", yanchor="top", xshift=14, font={"size": 10})  # fmt: skip
    for index, (name, here) in enumerate(groups.items()):
        symbol = "diamond-open" if name == "by counters" else "circle"
        color = {"Fovea": OURS, "by counters": GREY}.get(name, (RUNG, *OTHERS)[index % (1 + len(OTHERS))])
        found.add_scatter(x=[x for x, _, _ in here], y=[y / divisor for _, y, _ in here], name=name, mode="markers",
                          marker={"color": color, "size": 9, "symbol": symbol, "opacity": 0.85},
                          hoverinfo="text", hovertext=[f"<b>{text}</b><br>{y:,.4g} GFLOP/s at {x:.3g} a byte" for x, y, text in here])  # fmt: skip
    low, high = min(min(y for _, y, _ in points), left * bandwidth) / divisor, top / divisor
    log_axis(found, "x", *decades(left, right))
    log_axis(found, "y", *decades(low, high))
    found.update_xaxes(range=[math.log10(left), math.log10(right)])
    found.update_yaxes(range=[math.log10(low) - 0.2, math.log10(high) + 0.35])
    return found


def decades(low: float, high: float) -> tuple[list[float], list[str]]:
    """Powers of ten, and how they are written."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [10.0**n for n in powers], [f"{10.0**n:,g}" if -3 < n < 4 else f"10<sup>{n}</sup>" for n in powers]


# ---- speed against length


def bench_lengths(rows: list[Row], names: Sequence[str]) -> go.Figure:
    """Contenders of bench/gpu/compare.py at one type, pass, head size and mask."""
    found = figure(220, y="TFLOP/s")
    for name in names:
        points = sorted((row["s_q"], row["contenders"][name]["tflops"]) for row in rows
                        if "tflops" in row["contenders"].get(name, {}))  # fmt: skip
        if points:
            found.add_scatter(x=[x for x, _ in points], y=[y for _, y in points], name=contender_name(name), mode="lines+markers",
                              line={"color": contender_color(name), "width": 3 if name == "ours" else 2})  # fmt: skip
    length_axis(found, (row["s_q"] for row in rows))
    found.update_yaxes(rangemode="tozero", nticks=5)
    return found


def contender_name(name: str) -> str:
    if tables.is_ours(name):
        return "Fovea" + (f" ({name.partition(':')[2]})" if ":" in name else "")
    return tables.PEER_NAMES.get(name, name)


def contender_color(name: str) -> str:
    return CONTENDERS.get(name, VIOLET)


def cpu_lengths(rows: list[Row]) -> go.Figure:
    """Both sides of bench/cpu/compare.py at one type, pass and head size; dashed: causal."""
    divisor, unit = scaled((row[side]["gflops"] for row in rows for side in ("ours", "torch") if side in row), "GFLOP/s")
    found = figure(220, y=unit)
    for side, name, color in (("ours", "Fovea", OURS), ("torch", "PyTorch", ORANGE)):
        for causal in (False, True):
            points = sorted((row["s"], row[side]["gflops"] / divisor) for row in rows if row["causal"] == causal and side in row)
            if points:
                found.add_scatter(x=[x for x, _ in points], y=[y for _, y in points], name=name + (", causal" if causal else ""),
                                  mode="lines+markers", line={"color": color, "width": 3, "dash": "dot" if causal else "solid"})  # fmt: skip
    length_axis(found, (row["s"] for row in rows))
    found.update_yaxes(rangemode="tozero", nticks=5)
    return found


# ---- memory


def memory(rows: list[Row]) -> go.Figure:
    """Peak bytes over the length: of the rungs of one group that keep the matrix, of the others, and of the library."""
    found = figure(340, x="length", y="peak bytes")
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if "peak_bytes" in row:
            lines.setdefault(row["rung"], {})[data.length_of(row["shape"])] = row["peak_bytes"]
            if "library" in row:
                lines.setdefault("Fovea", {})[data.length_of(row["shape"])] = row["library"]["peak_bytes"]
    rungs = [rung for rung in lines if rung != "Fovea"]
    for rung, same in alike(lines).items():
        by_length = lines[rung]
        name = rung if len(same) == 1 else f"{', '.join(same)}" if len(same) < 4 else f"{rung} to {same[-1]}"
        points = sorted(by_length.items())
        color = OURS if rung == "Fovea" else RED if keeps_matrix(by_length) else ramp(rungs.index(rung) + 1, len(rungs) + 1)
        found.add_scatter(x=[x for x, _ in points], y=[y for _, y in points], name=name, mode="lines+markers",
                          line={"color": color, "width": 3 if color in (RED, OURS) else 2}, hoverinfo="text",
                          hovertext=[f"<b>{name}</b>, length {x:,}<br>{bytes_text(y)}" for x, y in points])  # fmt: skip
    counts = [count for by_length in lines.values() for count in by_length.values()]
    ticks = [4.0**n for n in range(8, 20) if min(counts) / 4 <= 4.0**n <= max(counts) * 4]
    length_axis(found, (x for by_length in lines.values() for x in by_length))
    log_axis(found, "y", ticks, [bytes_text(tick) for tick in ticks])
    return found


def alike(lines: dict[str, dict[int, float]]) -> dict[str, list[str]]:
    """Lines that lie within 2 % of each other at every length, under the first of them."""
    found: dict[str, list[str]] = {}
    for name, line in lines.items():
        for first in found:
            there = lines[first]
            if there.keys() == line.keys() and all(abs(line[x] / there[x] - 1) < 0.02 for x in line):
                found[first].append(name)
                break
        else:
            found[name] = [name]
    return found


def keeps_matrix(by_length: dict[int, float]) -> bool:
    """Whether the memory grows with the square of the length: by more than its power 1.5, from the middle to the end."""
    lengths = sorted(by_length)
    middle, last = lengths[len(lengths) // 2], lengths[-1]
    if middle == last:
        return False
    return math.log(by_length[last] / by_length[middle]) > 1.5 * math.log(last / middle)


# ---- calls from Python


def python_calls(result: Row) -> go.Figure:
    times = result["microseconds"]
    lines = max(len(lines_of(name)) for name in times)  # of 14 pixels
    found = figure(54 + (4 + 14 * max(2, lines)) * len(times), x="µs")
    colors = [OURS if name.startswith(("fovea", "the compiled")) else ORANGE for name in times]
    found.add_bar(x=list(times.values()), y=[in_lines(name) for name in times], orientation="h", marker={"color": colors},
                  text=[f"{value:.3g}" for value in times.values()], textposition="outside", cliponaxis=False,
                  hoverinfo="x+y")  # fmt: skip
    found.update_layout(bargap=0.25)
    found.update_yaxes(autorange="reversed", showgrid=False, tickfont={"size": 11})
    found.update_xaxes(range=[0, max(times.values()) * 1.15], nticks=4)
    return found
