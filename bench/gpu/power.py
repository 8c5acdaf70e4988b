"""What limits a kernel's rate, its cycles or the card's power: its time while the card is hot, with clocks and watts, and after a pause.

    python3 bench/gpu/power.py --lib before=OLD/libfovea.so --lib now=build/release/lib/libfovea.so --shape bf16,bwd,b1,s16384,h16,d128
    python3 bench/gpu/power.py --lib now=PATH --contenders fa4 --shape bf16,bwd,b4,s4096,h32,d64,causal --json FILE

Each contender runs for --seconds without a pause, in turns; what counts is the second half, when clocks have settled at what the power
limit leaves. Energy is power times time. After a pause of a tenth of a second a launch runs at the highest clock: that is the least of
four. Outputs are verified before. --json keeps the other shapes of FILE.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import compare
from cycles import named_libraries
from device import Gpu
from shapes import Shape, parse
from tables import write_whole

PAUSE, PAUSES, ROUNDS = 0.12, 4, 2


def after_a_pause(call: Any) -> float:
    """Milliseconds of one run, the least of several."""
    import torch

    least = float("inf")
    for _ in range(PAUSES):
        torch.cuda.synchronize()
        time.sleep(PAUSE)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call.run()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end))
    return least


def while_hot(entrant: compare.Entrant, gpu: Gpu, seconds: float) -> dict[str, float]:
    """Means of the second half of `seconds`: milliseconds of a run, clock, power."""
    import torch

    start, readings, milliseconds, runs = time.monotonic(), [], 0.0, 0
    while (now := time.monotonic()) < start + seconds or not runs:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        entrant.turn()
        end.record()
        counts = now > start + seconds / 2
        if counts:
            readings.append(gpu.reading())
        end.synchronize()
        if counts:
            milliseconds += begin.elapsed_time(end)
            runs += entrant.launches
    return {
        "ms": milliseconds / runs,
        "sm_mhz": fmean(reading["sm_mhz"] for reading in readings),
        "power_w": fmean(reading["power_w"] for reading in readings),
    }


def measure(shape: Shape, prepares: dict[str, Any], gpu: Gpu, seconds: float) -> dict[str, dict[str, Any]]:
    """Contender -> its figures, or why it has none."""
    import contenders
    import torch
    import verify

    found: dict[str, dict[str, Any]] = {name: {} for name in prepares}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), compare.in_context(shape):
        inputs = contenders.Inputs(shape, 1)
        expected = verify.slices(inputs)
        entrants: list[compare.Entrant] = []
        for name, prepare in prepares.items():
            try:
                entrant = compare.Entrant(name, prepare, [inputs], stream)
                entrant.calls[0].poison()
                entrant.turn()
                stream.synchronize()
                outputs = entrant.calls[0].outputs()
                wrong = verify.wrong(shape, verify.errors(expected, outputs), outputs)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                wrong = compare.reason_of(error)
            if wrong:
                found[name]["failed"] = wrong
            else:
                entrants.append(entrant)
        for entrant in entrants:
            found[entrant.name]["ms_after_a_pause"] = after_a_pause(entrant.calls[0])
        hot: dict[str, list[dict[str, float]]] = {entrant.name: [] for entrant in entrants}
        for _ in range(ROUNDS):
            for entrant in entrants:
                hot[entrant.name].append(while_hot(entrant, gpu, seconds))
    for name, rounds in hot.items():
        means = {key: fmean(one[key] for one in rounds) for key in rounds[0]}
        means["mj"] = means["ms"] * means["power_w"]
        found[name] |= {key: round(value, 4 if key == "ms" else 0) for key, value in means.items()}
        found[name]["ms_after_a_pause"] = round(found[name]["ms_after_a_pause"], 4)
    return found


def line_of(shape: Shape, name: str, entry: dict[str, Any]) -> str:
    if "failed" in entry:
        return f"{shape.name:34} {name:12} -  {entry['failed']}"
    return (f"{shape.name:34} {name:12} {entry['ms']:.3f} ms at {entry['sm_mhz']:.0f} MHz and {entry['power_w']:.0f} W, {entry['mj']:.0f} mJ; "
            f"{entry['ms_after_a_pause']:.3f} ms after a pause")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", required=True, metavar="NAME=PATH", help="a libfovea.so; again for more")
    parser.add_argument("--shape", action="append", required=True, metavar="WORDS", help="as compare.py's; again for more")
    parser.add_argument("--contenders", type=compare.words(compare.CONTENDERS[1:]), default=[], metavar="NAME,...", help="peers beside")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a contender's turn (1); each has two")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures; other shapes of FILE are kept")
    args = parser.parse_args()
    paths = named_libraries(parser, args.lib)
    try:
        shapes = [parse(text) for text in args.shape]
    except ValueError as error:
        sys.exit(f"power.py: {error}")
    try:
        import torch
    except ImportError:
        sys.exit("power.py: PyTorch is not installed")
    if not torch.cuda.is_available():
        sys.exit("power.py: PyTorch sees no GPU; nvidia-smi tells whether the driver does")
    import contenders
    from fovea_ctypes import Library

    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu(0, str(properties.uuid) if hasattr(properties, "uuid") else None)
    if not {"sm_mhz", "power_w"} <= gpu.reading().keys():
        sys.exit("power.py: neither NVML nor nvidia-smi tells this GPU's clock and power")
    libraries = {name: Library(path.resolve()) for name, path in paths.items()}
    result: dict[str, Any] = {"shapes": {}}
    if args.json is not None and args.json.is_file():
        result |= json.loads(args.json.read_text(encoding="utf-8"))
    for shape in shapes:
        ours = {name: contenders.ours(library, [""], shape, [])["ours"] for name, library in libraries.items()}
        found = measure(shape, ours | contenders.peers(args.contenders), gpu, args.seconds)
        result["shapes"][shape.name] = found
        for name, entry in found.items():
            print(line_of(shape, name, entry), flush=True)
    if args.json is not None:
        result |= {"gpu": gpu.about(), "date": datetime.date.today().isoformat(), "software": compare.about_software(None)}
        write_whole(args.json, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
