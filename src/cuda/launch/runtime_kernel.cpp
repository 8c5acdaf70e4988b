// Compiles kernels at run time.
#include "cuda/launch/runtime_kernel.hpp"

#include <cuda.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "cuda/kernels/args.hpp"
#include "cuda/launch/kernel_headers.hpp"

namespace fovea::cuda {
namespace {

constexpr std::string_view kExpressionHeader = "cuda/warp/expression.cuh";

/// The kernel, and what has to be the same here and there: the layout of its parameter.
std::string text_of(const KernelSource& source) {
  const auto same_size = [](const char* type, size_t size) {
    return "static_assert(sizeof(fovea::cuda::" + std::string(type) + ") == " + std::to_string(size) + ");\n";
  };
  return source.text + same_size("ForwardArgs", sizeof(ForwardArgs)) +
         same_size("BackwardArgs", sizeof(BackwardArgs));
}

std::vector<std::string> options() {
  return {"--std=c++20",
          // The host's functions of our headers, all of them constexpr, have no execution space. nvcc has
          // --expt-relaxed-constexpr for that.
          "--device-as-default-execution-space", "--disable-warnings",
          "--define-macro=FOVEA_TENSOR_MAP_ALIGNMENT=" + std::to_string(alignof(CUtensorMap))};
}

NvrtcProgram program_of(const Kernel& kernel, const std::string& expression, std::string architecture) {
  NvrtcProgram program{text_of(kernel.source), {}, options(), std::move(architecture), kernel.source.entry};
  for (KernelHeader header : kernel_headers()) {
    if (!expression.empty() && header.name == kExpressionHeader) header.text = expression.c_str();
    program.headers.push_back(header);
  }
  return program;
}

/// All that the code depends on.
std::string key_of(const NvrtcProgram& program, const std::string& expression, int nvrtc_version) {
  std::string key = "NVRTC " + std::to_string(nvrtc_version) + "\nheaders " + kernel_headers_digest() +
                    "\nentry " + program.entry + "\nchip " + program.architecture + "\n";
  for (const std::string& option : program.options) key += option + "\n";
  return key + program.text + '\0' + expression;
}

/// Symbol and code as one value of the cache.
std::string packed(const NvrtcOutput& output) {
  return output.symbol + '\0' + output.code;
}
bool unpack(const std::string& value, CompiledKernel& to) {
  const size_t end = value.find('\0');
  if (end == std::string::npos) return false;
  to.symbol = value.substr(0, end);
  to.code = value.substr(end + 1);
  return true;
}

/// What the compiler found first.
std::string first_error(const std::string& log) {
  const size_t at = log.find("error");
  const size_t begin = at == std::string::npos ? 0 : log.rfind('\n', at) + 1;
  return log.substr(begin, log.find('\n', begin) - begin);
}

std::string chip_text(int capability) {
  return "compute capability " + std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

}  // namespace

CompiledKernel compile_kernel(const Kernel& kernel, const std::string& expression, int capability,
                              const Nvrtc& nvrtc, const KernelCache& cache) {
  CompiledKernel result;
  if (kernel.source.text == nullptr) {
    result.clause = "does not take expressions";
    return result;
  }
  if (!nvrtc.missing.empty()) {
    result.clause = nvrtc.missing;
    return result;
  }
  std::string architecture = nvrtc_architecture(nvrtc, capability, kernel.source.specific);
  if (architecture.empty()) {
    result.clause = "is not compiled for " + chip_text(capability) + " by NVRTC " +
                    std::to_string(nvrtc.version / 1000) + "." + std::to_string(nvrtc.version % 1000 / 10) +
                    " (" + nvrtc.file + ")";
    return result;
  }
  const NvrtcProgram program = program_of(kernel, expression, std::move(architecture));
  const std::string key = key_of(program, expression, nvrtc.version);
  if (const std::optional<std::string> kept = cache.find(key); kept && unpack(*kept, result)) {
    result.from_disk = true;
    return result;
  }
  NvrtcOutput output = compile(nvrtc, program);
  if (!output.error.empty()) {
    result.clause = "does not compile for the expression: " + first_error(output.error);
    return result;
  }
  if (std::string why = cache.keep(key, packed(output)); !why.empty()) {
    result.note = "not kept for later processes (" + why + ")";
  }
  result.code = std::move(output.code);
  result.symbol = std::move(output.symbol);
  return result;
}

const CompiledKernel& compile_kernel(const Kernel& kernel, const std::string& expression, int capability) {
  struct Entry {
    std::once_flag once;
    CompiledKernel compiled;
  };
  static std::mutex mutex;
  static std::map<std::tuple<const Kernel*, int, std::string>, Entry> entries;  // nodes stay where they are
  Entry* entry = nullptr;
  {
    const std::scoped_lock lock(mutex);
    entry = &entries[{&kernel, capability, expression}];
  }
  std::call_once(entry->once, [&] {
    entry->compiled = compile_kernel(kernel, expression, capability, nvrtc(), KernelCache::of_user());
  });
  return entry->compiled;
}

}  // namespace fovea::cuda
