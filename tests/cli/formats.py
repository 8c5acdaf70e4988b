"""Reads and writes .npy and .safetensors, reads .png and .svg, as far as the tests need; written from the formats' descriptions."""
import json
import math
import pathlib
import struct
import xml.etree.ElementTree
import zlib

CODES = {"f4": "f", "f8": "d", "i4": "i", "i8": "q", "u1": "B", "b1": "?", "f2": "e"}
SAFETENSORS = {"f4": "F32", "f8": "F64", "i4": "I32", "i8": "I64", "u1": "U8", "b1": "BOOL", "f2": "F16", "bf16": "BF16",
               "e4m3": "F8_E4M3"}
# Of float8_e4m3fn: what the codes from 0 to 126 are worth; 128 is added to those of negative numbers.
E4M3 = [math.ldexp(code % 8 + (8 if code >= 8 else 0), max(code // 8, 1) - 10) for code in range(127)]


class Array:
    """Elements in row-major order, with a shape and one of the types above."""

    def __init__(self, values, shape, dtype="f4"):
        self.values, self.shape, self.dtype = list(values), tuple(shape), dtype
        count = 1
        for size in self.shape:
            count *= size
        assert count == len(self.values), (self.shape, len(self.values))

    def to_bytes(self):
        if self.dtype == "bf16":
            words = [struct.unpack("<I", struct.pack("<f", x))[0] for x in self.values]
            # To nearest, ties to even.
            return struct.pack(f"<{len(words)}H", *[(w + 0x7fff + (w >> 16 & 1)) >> 16 for w in words])
        if self.dtype == "e4m3":
            return bytes(min(range(127), key=lambda code: abs(E4M3[code] - abs(x))) + 128 * (x < 0) for x in self.values)
        return struct.pack(f"<{len(self.values)}{CODES[self.dtype]}", *self.values)

    @staticmethod
    def from_bytes(content, shape, dtype):
        if dtype == "bf16":
            codes = struct.unpack(f"<{len(content) // 2}H", content)
            return Array([struct.unpack("<f", struct.pack("<I", c << 16))[0] for c in codes], shape, dtype)
        if dtype == "e4m3":
            return Array([E4M3[code % 128] * (-1 if code >= 128 else 1) for code in content], shape, dtype)
        return Array(struct.unpack(f"<{len(content) // struct.calcsize(CODES[dtype])}{CODES[dtype]}", content), shape, dtype)


def write_npy(path, array):
    prefix = "|" if array.dtype in ("u1", "b1") else "<"
    shape = "(" + "".join(f"{size}, " for size in array.shape) + ")"
    kind = {"bf16": "V2", "e4m3": "V1"}.get(array.dtype, array.dtype)
    header = f"{{'descr': '{prefix}{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    pathlib.Path(path).write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + array.to_bytes())


def read_npy(path):
    content = pathlib.Path(path).read_bytes()
    assert content[:8] == b"\x93NUMPY\x01\x00", content[:8]
    length = struct.unpack("<H", content[8:10])[0]
    assert (10 + length) % 64 == 0
    header = eval(content[10:10 + length], {"__builtins__": {}})  # the test's own output
    dtype = "bf16" if header["descr"] == "<V2" else header["descr"][1:]
    return Array.from_bytes(content[10 + length:], header["shape"], dtype)


def write_safetensors(path, arrays, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, array in arrays.items():
        content = array.to_bytes()
        header[name] = {"dtype": SAFETENSORS[array.dtype], "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    content = pathlib.Path(path).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8:8 + length]), content[8 + length:]
    names = {v: k for k, v in SAFETENSORS.items()}
    return {name: Array.from_bytes(data[slice(*entry["data_offsets"])], entry["shape"], names[entry["dtype"]])
            for name, entry in header.items() if name != "__metadata__"}


def read_png(path):
    """Width, height and the pixels as rows of (red, green, blue)."""
    content = pathlib.Path(path).read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed = 8, b""
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at:at + 8])
        body = content[at + 8:at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", body[:10])
            assert (depth, color) == (8, 2)
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    raw, stride, rows, before = zlib.decompress(packed), 3 * width, [], bytes(3 * width)
    for y in range(height):
        start = y * (stride + 1)
        kind, line = raw[start], bytearray(raw[start + 1:start + 1 + stride])
        for x in range(stride):
            left = line[x - 3] if x >= 3 else 0
            up, corner = before[x], before[x - 3] if x >= 3 else 0
            if kind == 1:
                line[x] = (line[x] + left) & 255
            elif kind == 2:
                line[x] = (line[x] + up) & 255
            elif kind == 3:
                line[x] = (line[x] + (left + up) // 2) & 255
            elif kind == 4:
                guess = left + up - corner
                line[x] = (line[x] + min((abs(guess - left), 0, left), (abs(guess - up), 1, up),
                                         (abs(guess - corner), 2, corner))[2]) & 255
        before = bytes(line)
        rows.append([tuple(before[i:i + 3]) for i in range(0, stride, 3)])
    return width, height, rows


def read_svg(path):
    """Width and height in CSS pixels, and the addresses of its images."""
    root = xml.etree.ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    width, height = (int(root.get(side).removesuffix("px")) for side in ("width", "height"))
    link = "{http://www.w3.org/1999/xlink}href"
    return width, height, [image.get(link) for image in root.iter("{http://www.w3.org/2000/svg}image")]
