// Files that appear complete or not at all.
#include "io/atomic_file.hpp"

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "test_support.hpp"

namespace fovea::io {
namespace {

namespace fs = std::filesystem;

using testing::as_bytes;
using testing::expect_file_error;
using testing::read_text;
using testing::TemporaryDirectory;
using testing::write_text;

TEST(AtomicFile, AppearsOnlyWhenCommitted) {
  const TemporaryDirectory directory;
  const fs::path output = directory / "out";
  AtomicFile file(output);
  file.write(as_bytes("one "));
  file.write(as_bytes("two"));
  EXPECT_FALSE(fs::exists(output));
  file.commit();
  EXPECT_EQ(read_text(output), "one two");
  EXPECT_EQ(directory.listing().size(), 1U);
}

TEST(AtomicFile, LeavesTheOldFileWhenNotCommitted) {
  const TemporaryDirectory directory;
  const fs::path output = directory / "out";
  write_text(output, "old");
  {
    AtomicFile file(output);
    file.write(as_bytes("new"));
    EXPECT_EQ(read_text(output), "old");
    EXPECT_EQ(directory.listing().size(), 2U);
  }
  EXPECT_EQ(read_text(output), "old");
  EXPECT_EQ(directory.listing().size(), 1U);
}

TEST(AtomicFile, ReplacesAndKeepsPermissions) {
  const TemporaryDirectory directory;
  const fs::path output = directory / "out";
  write_text(output, "a longer old content");
  fs::permissions(output, fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_read);
  write_file_atomically(output, as_bytes("new"));
  EXPECT_EQ(read_text(output), "new");
  EXPECT_EQ(fs::status(output).permissions(),
            fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_read);
}

TEST(AtomicFile, NewFileHasTheUsersUsualPermissions) {
  const TemporaryDirectory directory;
  const mode_t old_mask = ::umask(0027);
  write_file_atomically(directory / "out", as_bytes("x"));
  ::umask(old_mask);
  EXPECT_EQ(fs::status(directory / "out").permissions(),
            fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_read);
}

TEST(AtomicFile, WritesIntoTheCurrentDirectory) {
  const TemporaryDirectory directory;
  const fs::path before = fs::current_path();
  fs::current_path(directory / "");
  write_file_atomically("out", as_bytes("here"));
  fs::current_path(before);
  EXPECT_EQ(read_text(directory / "out"), "here");
}

TEST(AtomicFile, NameMayBeAsLongAsTheFileSystemAllows) {
  const TemporaryDirectory directory;
  const fs::path output = directory / std::string(255, 'x');
  write_file_atomically(output, as_bytes("x"));
  EXPECT_EQ(read_text(output), "x");
}

TEST(AtomicFile, FollowsASymbolicLinkAndKeepsIt) {
  const TemporaryDirectory directory;
  fs::create_directory(directory / "elsewhere");
  write_text(directory / "elsewhere/target", "old");
  fs::create_symlink("elsewhere/target", directory / "link");
  write_file_atomically(directory / "link", as_bytes("new"));
  EXPECT_TRUE(fs::is_symlink(directory / "link"));
  EXPECT_EQ(read_text(directory / "elsewhere/target"), "new");
}

TEST(AtomicFile, RefusesALinkToNothing) {
  const TemporaryDirectory directory;
  fs::create_symlink("nowhere", directory / "link");
  expect_file_error([&] { AtomicFile file(directory / "link"); }, (directory / "link").string(),
                    "is a symbolic link to a file that does not exist");
}

TEST(AtomicFile, RefusesALinkToItself) {
  const TemporaryDirectory directory;
  fs::create_symlink("link", directory / "link");
  expect_file_error([&] { AtomicFile file(directory / "link"); }, (directory / "link").string(),
                    "cannot be looked at");
}

TEST(AtomicFile, RefusesWhatIsNotARegularFile) {
  const TemporaryDirectory directory;
  fs::create_directory(directory / "folder");
  ASSERT_EQ(::mkfifo((directory / "pipe").c_str(), 0600), 0);
  for (const fs::path& output : {directory / "folder", directory / "pipe", fs::path("/dev/null")}) {
    expect_file_error([&] { AtomicFile file(output); }, output.string(), "exists and is not a regular file");
  }
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST(AtomicFile, NamesAMissingDirectory) {
  const TemporaryDirectory directory;
  expect_file_error([&] { AtomicFile file(directory / "missing/out"); }, (directory / "missing/out").string(),
                    "cannot create a file in its directory: No such file or directory");
  expect_file_error([] { AtomicFile file{fs::path()}; }, "", "is not the name of a file");
  expect_file_error([&] { AtomicFile file(directory / "missing/"); }, (directory / "missing/").string(),
                    "is not the name of a file");
}

class SameFile : public ::testing::Test {
 protected:
  void SetUp() override {
    write_text(input(), "precious");
    write_text(other(), "other");
  }
  fs::path input() const { return directory_ / "input"; }
  fs::path other() const { return directory_ / "other"; }

  void expect_refused(const fs::path& output) const {
    const std::vector<fs::path> inputs{other(), input()};
    expect_file_error([&] { refuse_input_as_output(output, inputs); }, output.string(),
                      "is the same file as the input " + input().string() + "; give the output another name");
    expect_file_error([&] { write_file_atomically(output, as_bytes("gone"), inputs); }, output.string(),
                      "is the same file as the input");
    EXPECT_EQ(read_text(input()), "precious");
  }

  TemporaryDirectory directory_;
};

TEST_F(SameFile, IsRefusedUnderTheSameName) {
  expect_refused(input());
}

TEST_F(SameFile, IsRefusedUnderAnotherSpelling) {
  fs::create_directory(directory_ / "sub");
  expect_refused(directory_ / "sub/../input");
  expect_refused(directory_ / "./input");
}

TEST_F(SameFile, IsRefusedThroughASymbolicLink) {
  fs::create_symlink("input", directory_ / "link");
  expect_refused(directory_ / "link");
}

TEST_F(SameFile, IsRefusedThroughALinkedDirectory) {
  fs::create_directory_symlink(".", directory_ / "here");
  expect_refused(directory_ / "here/input");
}

TEST_F(SameFile, IsRefusedThroughAHardLink) {
  fs::create_hard_link(input(), directory_ / "hard");
  expect_refused(directory_ / "hard");
}

TEST_F(SameFile, IsRefusedWhenTheInputIsTheLink) {
  fs::create_symlink("other", directory_ / "link");
  const std::vector<fs::path> inputs{directory_ / "link"};
  expect_file_error([&] { refuse_input_as_output(other(), inputs); }, other().string(),
                    "is the same file as");
}

TEST_F(SameFile, IsRefusedWhenItBecomesAnInputBeforeTheCommit) {
  const std::vector<fs::path> inputs{input()};
  AtomicFile file(directory_ / "out", inputs);
  file.write(as_bytes("new"));
  fs::create_hard_link(input(), directory_ / "out");
  expect_file_error([&] { file.commit(); }, (directory_ / "out").string(), "is the same file as the input");
  EXPECT_EQ(read_text(input()), "precious");
}

TEST_F(SameFile, OtherFilesAndMissingInputsAreNot) {
  const std::vector<fs::path> inputs{input(), directory_ / "missing"};
  EXPECT_NO_THROW(refuse_input_as_output(other(), inputs));
  EXPECT_NO_THROW(refuse_input_as_output(directory_ / "new", inputs));
  EXPECT_NO_THROW(refuse_input_as_output(input(), {}));
}

/// Lets no file of this process grow beyond a few bytes, as a full disk would.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    rlimit limit = old_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit old_{};
  void (*old_handler_)(int);
};

TEST(AtomicFile, FailedWriteLeavesTheOldFileAndNoTemporary) {
  const TemporaryDirectory directory;
  const fs::path output = directory / "out";
  write_text(output, "old");
  const std::string large(100'000, 'x');
  {
    const FileSizeLimit limit(1000);
    expect_file_error([&] { write_file_atomically(output, as_bytes(large)); }, output.string(),
                      "cannot write: File too large");
  }
  EXPECT_EQ(read_text(output), "old");
  EXPECT_EQ(directory.listing().size(), 1U);
}

TEST(AtomicFile, FailedRenameLeavesNoTemporary) {
  const TemporaryDirectory directory;
  const fs::path output = directory / "out";
  {
    AtomicFile file(output);
    file.write(as_bytes("new"));
    fs::create_directory(output);
    expect_file_error([&] { file.commit(); }, output.string(), "cannot put it in place: Is a directory");
  }
  EXPECT_TRUE(fs::is_directory(output));
  EXPECT_EQ(directory.listing().size(), 1U);
}

}  // namespace
}  // namespace fovea::io
