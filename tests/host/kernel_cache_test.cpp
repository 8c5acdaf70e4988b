// The folder of compiled kernels: what is found again, what is not trusted, and what cannot be written.
#include "cuda/launch/kernel_cache.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

namespace fovea_test {
namespace {

namespace fs = std::filesystem;
using fovea::cuda::KernelCache;

class KernelCaches : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "fovea-cache-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    top_ = name;
  }
  void TearDown() override {
    fs::permissions(top_, fs::perms::owner_all);
    fs::remove_all(top_);
  }
  fs::path top_;
  const std::string key_ = std::string("the key\0with a null", 19), value_ = std::string(1000, 'v');
};

std::string contents_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write(const fs::path& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
}

TEST_F(KernelCaches, FindWhatWasKept) {
  const KernelCache cache(top_ / "a/b");
  EXPECT_EQ(cache.find(key_), std::nullopt);
  EXPECT_EQ(cache.keep(key_, value_), "");
  EXPECT_EQ(cache.find(key_), value_);
  EXPECT_EQ(cache.find(key_ + "x"), std::nullopt);
  EXPECT_EQ(cache.keep(key_, "other"), "");
  EXPECT_EQ(cache.find(key_), "other");
  EXPECT_EQ(KernelCache(top_ / "a/b").find(key_), "other");
  for (const fs::path& made : {top_ / "a", top_ / "a/b"}) {
    EXPECT_EQ(fs::status(made).permissions(), fs::perms::owner_all) << made;
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(top_ / "a/b"), {}), 1) << "temporary files stay behind";
}

TEST_F(KernelCaches, DoNotTakeDamagedFiles) {
  const KernelCache cache(top_);
  ASSERT_EQ(cache.keep(key_, value_), "");
  const std::string sound = contents_of(cache.file_of(key_));
  ASSERT_GT(sound.size(), key_.size() + value_.size());
  std::string changed = sound;
  changed.back() ^= 1;
  std::string older = sound;
  older[14] = '0';
  std::string longer = sound;
  longer[24] ^= 1;  // the size of the value
  std::string huge = sound;
  huge[31] = '\x7f';
  for (const std::string& bytes : {changed, older, longer, huge, sound + "x",
                                   sound.substr(0, sound.size() - 1), sound.substr(0, 20), std::string()}) {
    write(cache.file_of(key_), bytes);
    EXPECT_EQ(cache.find(key_), std::nullopt);
    EXPECT_EQ(cache.keep(key_, value_), "");
    EXPECT_EQ(cache.find(key_), value_) << "the damaged file is replaced";
  }
}

TEST_F(KernelCaches, CompareWholeKeys) {
  const KernelCache cache(top_);
  ASSERT_EQ(cache.keep("one", value_), "");
  fs::rename(cache.file_of("one"), cache.file_of("two"));  // as if both had the same name
  EXPECT_EQ(cache.find("two"), std::nullopt);
}

TEST_F(KernelCaches, DoNotTrustWhatOthersCanWrite) {
  const KernelCache cache(top_);
  ASSERT_EQ(cache.keep(key_, value_), "");
  fs::permissions(cache.file_of(key_), fs::perms::group_write, fs::perm_options::add);
  EXPECT_EQ(cache.find(key_), std::nullopt);
  ASSERT_EQ(cache.keep(key_, value_), "");
  EXPECT_EQ(cache.find(key_), value_);
  fs::permissions(top_, fs::perms::others_write, fs::perm_options::add);
  EXPECT_EQ(cache.find(key_), std::nullopt);
  EXPECT_EQ(cache.keep(key_, value_), top_.string() + " can be written by others; chmod 700 it");
}

TEST_F(KernelCaches, FollowNoLinks) {
  fs::create_directory(top_ / "real");
  ASSERT_EQ(KernelCache(top_ / "real").keep(key_, value_), "");
  fs::create_directory_symlink(top_ / "real", top_ / "link");
  const KernelCache linked(top_ / "link");
  EXPECT_EQ(linked.find(key_), std::nullopt);
  EXPECT_EQ(linked.keep(key_, value_), (top_ / "link").string() + " is not a folder");

  const KernelCache cache(top_ / "real");
  fs::rename(cache.file_of(key_), top_ / "elsewhere");
  fs::create_symlink(top_ / "elsewhere", cache.file_of(key_));
  EXPECT_EQ(cache.find(key_), std::nullopt);
  EXPECT_EQ(cache.keep(key_, "new"), "");
  EXPECT_EQ(cache.find(key_), "new");
  EXPECT_EQ(contents_of(top_ / "elsewhere").size(), fs::file_size(cache.file_of(key_)) + value_.size() - 3)
      << "what the link led to is as it was";
}

TEST_F(KernelCaches, RefuseForeignFolders) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  ASSERT_EQ(::chown(top_.c_str(), 65534, 65534), 0);
  EXPECT_EQ(KernelCache(top_).keep(key_, value_), top_.string() + " belongs to another user");
  EXPECT_EQ(KernelCache(top_).find(key_), std::nullopt);
  ASSERT_EQ(::chown(top_.c_str(), 0, 0), 0);
}

TEST_F(KernelCaches, SayWhyTheyCannotWrite) {
  if (::geteuid() != 0) {
    fs::permissions(top_, fs::perms::owner_read | fs::perms::owner_exec);
    EXPECT_EQ(KernelCache(top_).keep(key_, value_), top_.string() + ": Permission denied");
  }
  EXPECT_NE(KernelCache("/dev/null/fovea").keep(key_, value_), "");
  EXPECT_NE(KernelCache("/proc/fovea").keep(key_, value_), "") << "read-only for root, too";
}

class Environment {
 public:
  explicit Environment(const char* name) : name_(name) {
    if (const char* value = std::getenv(name)) was_ = value;
  }
  ~Environment() { was_.empty() ? ::unsetenv(name_) : ::setenv(name_, was_.c_str(), 1); }
  void set(const char* value) const { value ? ::setenv(name_, value, 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::string was_;
};

TEST_F(KernelCaches, LieWhereTheEnvironmentSays) {
  const Environment own("FOVEA_CACHE_DIR"), xdg("XDG_CACHE_HOME"), home("HOME");
  const auto folder = [&] { return KernelCache::of_user().file_of(key_).parent_path().string(); };
  home.set("/home/somebody");
  own.set("/own");
  xdg.set("/xdg");
  EXPECT_EQ(folder(), "/own");
  own.set(nullptr);
  EXPECT_EQ(folder(), "/xdg/fovea");
  xdg.set("relative");
  EXPECT_EQ(folder(), "/home/somebody/.cache/fovea");
  own.set("");
  EXPECT_EQ(folder(), "");
  EXPECT_EQ(KernelCache::of_user().keep(key_, value_), "") << "the user wants none";
  own.set("relative");
  EXPECT_EQ(KernelCache::of_user().keep(key_, value_),
            "FOVEA_CACHE_DIR is 'relative', expected an absolute path");
  own.set(nullptr);
  xdg.set(nullptr);
  home.set(nullptr);
  EXPECT_EQ(KernelCache::of_user().keep(key_, value_), "neither FOVEA_CACHE_DIR nor HOME is set");
}

}  // namespace
}  // namespace fovea_test
