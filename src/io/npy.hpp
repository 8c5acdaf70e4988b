// The .npy format of numpy: one array per file.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "io/array.hpp"
#include "io/file_error.hpp"

/// NumPy's .npy: the magic, a version, the length of a header, the header (a Python dictionary with the
/// element type, the order and the shape, padded to 64 bytes) and the elements. Versions 1.0, 2.0 and 3.0
/// differ only in the width of the length and in the header's text encoding.
///
/// numpy has no code for bfloat16: the ml_dtypes package saves it as two bytes of no type ('<V2'), so that is
/// read and written as bf16; 'bfloat16' is read too. Likewise one byte of no type ('<V1') is float8_e4m3fn.
namespace fovea::io {

/// Reads a whole .npy file. The array is named after the file, without directory and extension.
/// Throws FileError when the file cannot be read, is damaged, has bytes after the array, or holds what Array
/// cannot: Fortran order, big-endian elements, Python objects, structured or other element types. Memory
/// stays below the size of the file plus a constant.
Array read_npy(const std::filesystem::path& path);

/// The same from memory; `name` takes the place of the path, in faults and for the array's name.
Array parse_npy(std::span<const std::byte> content, std::string name);

/// The bytes numpy.save writes for the array, in format version 1, 2 or 3 (`.0`).
/// Throws std::invalid_argument when the array is not valid (see validate) or the version is another.
std::vector<std::byte> serialize_npy(const Array& array, int version = 1);

/// Writes serialize_npy's bytes atomically. Throws FileError when the file cannot be written or is one of
/// `inputs`; std::invalid_argument as serialize_npy.
void write_npy(const std::filesystem::path& path, const Array& array,
               std::span<const std::filesystem::path> inputs = {}, int version = 1);

}  // namespace fovea::io
