// Finds NVRTC and compiles with it.
#include "cuda/launch/nvrtc.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "core/environment.hpp"

namespace fovea::cuda {

namespace fs = std::filesystem;

/// The functions of nvrtc.h, which machines that build the library may lack.
struct NvrtcFunctions {
  using Result = int;  // 0: success
  using Program = struct Opaque*;

  Result (*version)(int* major, int* minor) = nullptr;
  Result (*chip_count)(int* count) = nullptr;
  Result (*chips)(int* chips) = nullptr;
  Result (*create)(Program*, const char* text, const char* name, int headers, const char* const* texts,
                   const char* const* names) = nullptr;
  Result (*destroy)(Program*) = nullptr;
  Result (*add_name)(Program, const char*) = nullptr;
  Result (*compile)(Program, int count, const char* const* options) = nullptr;
  Result (*log_size)(Program, size_t*) = nullptr;
  Result (*log)(Program, char*) = nullptr;
  Result (*cubin_size)(Program, size_t*) = nullptr;
  Result (*cubin)(Program, char*) = nullptr;
  Result (*ptx_size)(Program, size_t*) = nullptr;
  Result (*ptx)(Program, char*) = nullptr;
  Result (*lowered_name)(Program, const char* name, const char** symbol) = nullptr;
  const char* (*error_string)(Result) = nullptr;
};

namespace {

constexpr int kOldest =
    12080;  // the first whose front end accepts the kernels, as cmake/cuda.cmake says of nvcc

template <class Function>
bool get(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

bool get_functions(void* library, NvrtcFunctions& f) {
  return get(library, "nvrtcVersion", f.version) && get(library, "nvrtcGetNumSupportedArchs", f.chip_count) &&
         get(library, "nvrtcGetSupportedArchs", f.chips) && get(library, "nvrtcCreateProgram", f.create) &&
         get(library, "nvrtcDestroyProgram", f.destroy) &&
         get(library, "nvrtcAddNameExpression", f.add_name) &&
         get(library, "nvrtcCompileProgram", f.compile) &&
         get(library, "nvrtcGetProgramLogSize", f.log_size) && get(library, "nvrtcGetProgramLog", f.log) &&
         get(library, "nvrtcGetCUBINSize", f.cubin_size) && get(library, "nvrtcGetCUBIN", f.cubin) &&
         get(library, "nvrtcGetPTXSize", f.ptx_size) && get(library, "nvrtcGetPTX", f.ptx) &&
         get(library, "nvrtcGetLoweredName", f.lowered_name) &&
         get(library, "nvrtcGetErrorString", f.error_string);
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// Fills all of `to` but `missing`; returns why it cannot. The library stays open.
std::string open(const std::string& file, Nvrtc& to) {
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  auto functions = std::make_unique<NvrtcFunctions>();
  int major = 0, minor = 0, count = 0;
  if (!get_functions(library, *functions) || functions->version(&major, &minor) != 0 ||
      functions->chip_count(&count) != 0) {
    return file + " is not NVRTC, or is older than CUDA " + version_text(kOldest);
  }
  to.version = 1000 * major + 10 * minor;
  if (to.version < kOldest) {
    return file + " is NVRTC " + version_text(to.version) + ", expected " + version_text(kOldest) +
           " or newer";
  }
  to.chips.resize(static_cast<size_t>(count));
  if (functions->chips(to.chips.data()) != 0) return file + " does not say what it compiles for";
  std::sort(to.chips.begin(), to.chips.end());
  to.file = file;
  static std::vector<std::unique_ptr<NvrtcFunctions>> kept;  // one, but in tests
  to.functions = kept.emplace_back(std::move(functions)).get();
  return "";
}

/// The library (or the program) that this function is in.
std::string own_file() {
  Dl_info info;
  return dladdr(reinterpret_cast<const void*>(&own_file), &info) != 0 && info.dli_fname != nullptr
             ? info.dli_fname
             : "";
}

/// A program of NVRTC, while it is compiled.
class Compilation {
 public:
  Compilation(const NvrtcFunctions& functions, const NvrtcProgram& program) : f_(functions) {
    std::vector<const char*> names, texts;
    for (const KernelHeader& header : program.headers) {
      names.push_back(header.name);
      texts.push_back(header.text);
    }
    error_ = f_.create(&program_, program.text.c_str(), "kernel.cu", static_cast<int>(names.size()),
                       texts.data(), names.data());
  }
  Compilation(const Compilation&) = delete;
  Compilation& operator=(const Compilation&) = delete;
  ~Compilation() {
    if (program_ != nullptr) f_.destroy(&program_);
  }

  /// Calls a function unless one before it has failed.
  template <class Function, class... Arguments>
  void call(Function function, Arguments... arguments) {
    if (error_ == 0) error_ = function(program_, arguments...);
  }
  template <class Size, class Text>
  std::string text(Size size_of, Text text_of) const {
    size_t size = 0;
    if (program_ == nullptr || size_of(program_, &size) != 0) return "";
    std::string bytes(size, '\0');
    return text_of(program_, bytes.data()) == 0 ? bytes : "";
  }
  bool failed() const { return error_ != 0; }
  /// Why: the compiler's log, or what NVRTC calls the error.
  std::string reason() const {
    std::string log = text(f_.log_size, f_.log);
    while (!log.empty() && (log.back() == '\0' || log.back() == '\n')) log.pop_back();
    return log.empty() ? f_.error_string(error_) : log;
  }

 private:
  const NvrtcFunctions& f_;
  NvrtcFunctions::Program program_ = nullptr;
  int error_ = 0;
};

}  // namespace

std::vector<std::string> nvrtc_candidates(const std::string& library) {
  if (std::string file = environment("FOVEA_NVRTC"); !file.empty()) return {file};
  constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
  std::vector<std::string> files(std::begin(kNames), std::end(kNames));
  const auto add = [&](const fs::path& folder) {
    for (const char* name : kNames) {
      std::error_code ignored;
      if (fs::exists(folder / name, ignored)) files.push_back((folder / name).string());
    }
  };
  for (const std::string& toolkit :
       {environment("CUDA_HOME"), environment("CUDA_PATH"), std::string("/usr/local/cuda")}) {
    if (toolkit.empty()) continue;
    add(fs::path(toolkit) / "lib64");
    add(fs::path(toolkit) / "lib");
  }
  // In site-packages, this library lies in fovea/ or fovea/lib/, and NVRTC in nvidia/.
  fs::path folder = fs::path(library).parent_path();
  for (int level = 0; level < 4 && folder.has_relative_path(); ++level, folder = folder.parent_path()) {
    for (const char* place : {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"}) add(folder / place);
  }
  return files;
}

Nvrtc open_nvrtc(std::span<const std::string> files) {
  Nvrtc found;
  std::string reason;  // of the last, but of one that is too old rather than of those that are not there
  for (const std::string& file : files) {
    found = {};
    std::string now = open(file, found);
    if (now.empty()) return found;
    if (reason.empty() || now.find("cannot open shared object") == std::string::npos) reason = std::move(now);
  }
  found = {};
  found.missing = "needs NVRTC to compile for the expression (" + reason +
                  "); install nvidia-cuda-nvrtc from PyPI, or set FOVEA_NVRTC to the file libnvrtc.so.13";
  return found;
}

const Nvrtc& nvrtc() {
  static const Nvrtc opened = open_nvrtc(nvrtc_candidates(own_file()));
  return opened;
}

std::string nvrtc_architecture(const Nvrtc& nvrtc, int capability, bool specific) {
  const auto after = std::upper_bound(nvrtc.chips.begin(), nvrtc.chips.end(), capability);
  if (after == nvrtc.chips.begin()) return "";
  const int chip = *(after - 1);
  if (specific) return chip == capability ? "sm_" + std::to_string(chip) + "a" : "";
  // Machine code runs on later chips of the same major version.
  return (chip / 10 == capability / 10 ? "sm_" : "compute_") + std::to_string(chip);
}

NvrtcOutput compile(const Nvrtc& nvrtc, const NvrtcProgram& program) {
  const NvrtcFunctions& f = *nvrtc.functions;
  const std::string architecture = "--gpu-architecture=" + program.architecture;
  std::vector<const char*> options = {architecture.c_str()};
  for (const std::string& option : program.options) options.push_back(option.c_str());

  Compilation compilation(f, program);
  const char* symbol = nullptr;
  compilation.call(f.add_name, program.entry.c_str());
  compilation.call(f.compile, static_cast<int>(options.size()), options.data());
  compilation.call(f.lowered_name, program.entry.c_str(), &symbol);
  if (compilation.failed()) return {"", "", compilation.reason()};
  const bool ptx = program.architecture.starts_with("compute_");
  NvrtcOutput out{ptx ? compilation.text(f.ptx_size, f.ptx) : compilation.text(f.cubin_size, f.cubin), symbol,
                  ""};
  if (out.code.empty()) out.error = "NVRTC gave no code for " + program.architecture;
  return out;
}

}  // namespace fovea::cuda
