// Reads the attributes of a cubin.
#include "cuda/launch/cubin.hpp"

#include <elf.h>

#include <cstdint>
#include <cstring>

namespace fovea::cuda {
namespace {

template <class T>
T read_at(const std::string& bytes, size_t at) {
  T value{};
  if (at <= bytes.size() && sizeof(T) <= bytes.size() - at) std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

}  // namespace

CubinUsage usage_of(const std::string& cubin) {
  constexpr int kRegisters = 0x2f, kFrame = 0x11, kWithSize = 0x04;  // EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
  CubinUsage usage;
  if (!cubin.starts_with(ELFMAG)) return usage;
  const auto head = read_at<Elf64_Ehdr>(cubin, 0);
  const auto section = [&](size_t i) {
    return read_at<Elf64_Shdr>(cubin, head.e_shoff + i * sizeof(Elf64_Shdr));
  };
  const size_t names = section(head.e_shstrndx).sh_offset;
  for (size_t i = 0; i < head.e_shnum; ++i) {
    const Elf64_Shdr s = section(i);
    const size_t name = names + s.sh_name;
    if (name >= cubin.size() || std::strcmp(cubin.c_str() + name, ".nv.info") != 0) continue;
    for (size_t at = s.sh_offset; at + 4 <= s.sh_offset + s.sh_size;) {
      const auto format = read_at<uint8_t>(cubin, at), attribute = read_at<uint8_t>(cubin, at + 1);
      const auto number =
          static_cast<int>(read_at<uint32_t>(cubin, at + 8));  // behind the index of the function
      if (format == kWithSize && attribute == kRegisters) usage.registers = number;
      if (format == kWithSize && attribute == kFrame) usage.local_bytes = number;
      at += 4 + (format == kWithSize ? read_at<uint16_t>(cubin, at + 2) : 0u);
    }
  }
  return usage;
}

}  // namespace fovea::cuda
