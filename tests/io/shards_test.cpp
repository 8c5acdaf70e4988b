// Tensors over several files: found, checked, read by rows.
#include "io/shards.hpp"

#include <cstring>
#include <fstream>

#include "io/safetensors.hpp"
#include "test_support.hpp"

namespace fovea::io {
namespace {

using testing::patterned_array;
using testing::TemporaryDirectory;

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path) << text;
}

TEST(Shards, NamesHaveNumbers) {
  EXPECT_EQ(shard_path("a/q.safetensors", 2, 4), "a/q-00002-of-00004.safetensors");
  EXPECT_EQ(shard_path("q.safetensors.index.json", 12, 345), "q-00012-of-00345.safetensors");
}

TEST(Shards, RowsComeFromTheirShardsOnly) {
  const TemporaryDirectory folder;
  const Array first = patterned_array("q", ElementType::f32, {2, 3, 2, 4});
  const Array second = patterned_array("q", ElementType::f32, {2, 5, 2, 4});
  write_safetensors(folder / "q-00001-of-00002.safetensors", {&first, 1});
  write_safetensors(folder / "q-00002-of-00002.safetensors", {&second, 1});
  const RowFile rows(folder / "q.safetensors", "q");
  EXPECT_EQ(rows.shape(), (std::vector<std::int64_t>{2, 8, 2, 4}));
  EXPECT_EQ(rows.files().size(), 2U);

  const Array all = rows.read_all();
  const std::size_t row = 2 * 4 * sizeof(float);
  std::vector<std::byte> some(4 * row);
  rows.read(1, 2, 6, some);
  EXPECT_EQ(std::memcmp(some.data(), all.bytes.data() + (8 + 2) * row, some.size()), 0);
  EXPECT_EQ(std::memcmp(some.data(), first.bytes.data() + (3 + 2) * row, row), 0);
  EXPECT_EQ(std::memcmp(some.data() + row, second.bytes.data() + 5 * row, 3 * row), 0);

  // Who has rows of the second shard alone does without the first.
  std::filesystem::remove(folder / "q-00001-of-00002.safetensors");
  some.resize(2 * row);
  rows.read(0, 4, 6, some);
  EXPECT_EQ(std::memcmp(some.data(), second.bytes.data() + row, some.size()), 0);
  EXPECT_THROW(rows.read(0, 2, 4, some), FileError);
}

TEST(Shards, AFileComesBeforeAnIndexAndAnIndexBeforeNumbers) {
  const TemporaryDirectory folder;
  const Array q = patterned_array("q", ElementType::u8, {3});
  for (const char* name : {"q.safetensors", "a.safetensors", "q-00001-of-00001.safetensors"})
    write_safetensors(folder / name, {&q, 1});
  write_text(folder / "q.safetensors.index.json", R"({"weight_map": {"q": ["a.safetensors"]}})");
  EXPECT_EQ(find_shards(folder / "q.safetensors", "q").shards[0].filename(), "q.safetensors");
  std::filesystem::remove(folder / "q.safetensors");
  EXPECT_EQ(find_shards(folder / "q.safetensors", "q").shards[0].filename(), "a.safetensors");
  std::filesystem::remove(folder / "q.safetensors.index.json");
  EXPECT_EQ(find_shards(folder / "q.safetensors", "q").shards[0].filename(), "q-00001-of-00001.safetensors");
}

TEST(Shards, ASizeThatOverflowsIsRefused) {
  const TemporaryDirectory folder;
  for (const char* name : {"q-00001-of-00002.safetensors", "q-00002-of-00002.safetensors"}) {
    std::string header = R"({"q":{"dtype":"U8","shape":[9223372036854775807,0],"data_offsets":[0,0]}})";
    write_text(folder / name, testing::little_endian(header.size(), 8) + header);
  }
  EXPECT_THROW(RowFile(folder / "q.safetensors", "q"), FileError);
}

}  // namespace
}  // namespace fovea::io
