// Files of compiled kernels: a head, the key, and the value.
#include "cuda/launch/kernel_cache.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/environment.hpp"

namespace fovea::cuda {

namespace fs = std::filesystem;

namespace {

struct Head {
  std::array<char, 16> magic{};
  uint64_t key_size = 0, value_size = 0, hash = 0;  ///< of key and value
};
constexpr std::string_view kMagic = "fovea kernel  1\n";  // the number changes with the format
constexpr uint64_t kMostBytes = uint64_t{64} << 20;       // no kernel comes near

/// FNV-1a. It names files and finds damage; which kernel a file holds is decided by the whole key.
uint64_t hash_of(std::string_view bytes, uint64_t hash = 0xcbf29ce484222325u) {
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  int number() const { return number_; }

 private:
  int number_;
};

bool read_all(int file, char* to, size_t size) {
  while (size > 0) {
    const ssize_t count = ::read(file, to, size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    to += count;
    size -= static_cast<size_t>(count);
  }
  return true;
}

bool write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(file, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

std::string errno_text() {
  return std::generic_category().message(errno);
}

/// Whether nobody else can put files there: code from it is run.
std::string distrusted_because(const fs::path& folder) {
  struct stat status {};
  if (::lstat(folder.c_str(), &status) != 0) return folder.string() + ": " + errno_text();
  if (!S_ISDIR(status.st_mode)) return folder.string() + " is not a folder";
  if (status.st_uid != ::geteuid()) return folder.string() + " belongs to another user";
  if ((status.st_mode & 022) != 0) return folder.string() + " can be written by others; chmod 700 it";
  return "";
}

/// Makes the folder, and those that it lies in, for this user alone.
void make_folder(const fs::path& folder) {
  struct stat status {};
  if (::stat(folder.c_str(), &status) == 0) return;
  if (folder.has_parent_path() && folder.parent_path() != folder) make_folder(folder.parent_path());
  ::mkdir(folder.c_str(), 0700);
}

}  // namespace

KernelCache KernelCache::of_user() {
  if (const char* folder = std::getenv("FOVEA_CACHE_DIR")) {
    if (*folder == '\0' || fs::path(folder).is_absolute()) return KernelCache(folder);
    return KernelCache("", "FOVEA_CACHE_DIR is '" + std::string(folder) + "', expected an absolute path");
  }
  // A relative path means nothing here, by the XDG specification.
  if (const fs::path xdg = environment("XDG_CACHE_HOME"); xdg.is_absolute())
    return KernelCache(xdg / "fovea");
  if (const fs::path home = environment("HOME"); home.is_absolute())
    return KernelCache(home / ".cache/fovea");
  return KernelCache("", "neither FOVEA_CACHE_DIR nor HOME is set");
}

KernelCache::KernelCache(fs::path folder, std::string unusable)
    : folder_(std::move(folder)), unusable_(std::move(unusable)) {}

fs::path KernelCache::file_of(const std::string& key) const {
  std::array<char, 24> name{};
  std::snprintf(name.data(), name.size(), "%016llx.kernel", static_cast<unsigned long long>(hash_of(key)));
  return folder_ / name.data();
}

std::optional<std::string> KernelCache::find(const std::string& key) const {
  if (folder_.empty() || !distrusted_because(folder_).empty()) return std::nullopt;
  const Descriptor file(::open(file_of(key).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status {};
  if (file.number() < 0 || ::fstat(file.number(), &status) != 0 || !S_ISREG(status.st_mode) ||
      status.st_uid != ::geteuid() || (status.st_mode & 022) != 0) {
    return std::nullopt;
  }
  Head head;
  const auto size = static_cast<uint64_t>(status.st_size);
  if (!read_all(file.number(), reinterpret_cast<char*>(&head), sizeof(head)) ||
      std::string_view(head.magic.data(), head.magic.size()) != kMagic || head.key_size != key.size() ||
      size > kMostBytes || head.value_size > size || size != sizeof(head) + head.key_size + head.value_size) {
    return std::nullopt;
  }
  std::string kept_key(head.key_size, '\0'), value(head.value_size, '\0');
  if (!read_all(file.number(), kept_key.data(), kept_key.size()) || kept_key != key ||
      !read_all(file.number(), value.data(), value.size()) || hash_of(value, hash_of(key)) != head.hash) {
    return std::nullopt;
  }
  return value;
}

std::string KernelCache::keep(const std::string& key, const std::string& value) const {
  if (folder_.empty()) return unusable_;
  make_folder(folder_);
  if (std::string why = distrusted_because(folder_); !why.empty()) return why;
  Head head{{}, key.size(), value.size(), hash_of(value, hash_of(key))};
  std::copy(kMagic.begin(), kMagic.end(), head.magic.begin());

  // Another machine may share the folder and have a process of the same number.
  static std::atomic<unsigned> counter{0};
  fs::path temporary;
  int number = -1;
  for (int attempt = 0; attempt < 100 && number < 0; ++attempt) {
    temporary = folder_ / (std::to_string(::getpid()) + "-" + std::to_string(counter++) + ".tmp");
    number = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (number < 0 && errno != EEXIST) break;
  }
  if (number < 0) return folder_.string() + ": " + errno_text();
  bool written = false;
  {
    const Descriptor file(number);
    written = write_all(number, {reinterpret_cast<const char*>(&head), sizeof(head)}) &&
              write_all(number, key) && write_all(number, value);
  }
  if (written && ::rename(temporary.c_str(), file_of(key).c_str()) == 0) return "";
  std::string why = folder_.string() + ": " + errno_text();
  ::unlink(temporary.c_str());
  return why;
}

}  // namespace fovea::cuda
