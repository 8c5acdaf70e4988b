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

/// The same for code that any NVRTC may have compiled: of one chip, whatever the compiler calls its architecture.
std::string key_ahead(const NvrtcProgram& program, const std::string& expression, int capability) {
  NvrtcProgram of_chip = program;
  of_chip.architecture = "ahead of time " + std::to_string(capability);
  return key_of(of_chip, expression, 0);
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

namespace {

/// What the cache has under the key.
bool find(const KernelCache& cache, const std::string& key, CompiledKernel& to) {
  const std::optional<std::string> kept = cache.find(key);
  to.from_disk = kept && unpack(*kept, to);
  return to.from_disk;
}

/// Why this NVRTC cannot compile a kernel for the chip; else the program's architecture.
std::string cannot_compile_because(const Nvrtc& nvrtc, int capability, NvrtcProgram& program, bool specific) {
  if (!nvrtc.missing.empty()) return nvrtc.missing;
  program.architecture = nvrtc_architecture(nvrtc, capability, specific);
  if (!program.architecture.empty()) return "";
  return "is not compiled for " + chip_text(capability) + " by NVRTC " +
         std::to_string(nvrtc.version / 1000) + "." + std::to_string(nvrtc.version % 1000 / 10) + " (" +
         nvrtc.file + ")";
}

void compile_and_keep(const Nvrtc& nvrtc, const NvrtcProgram& program, const KernelCache& cache,
                      const std::string& key, CompiledKernel& result) {
  NvrtcOutput output = compile(nvrtc, program);
  if (!output.error.empty()) {
    result.clause = "does not compile for the expression: " + first_error(output.error);
    return;
  }
  if (std::string why = cache.keep(key, packed(output)); !why.empty()) {
    result.note = "not kept for later processes (" + why + ")";
  }
  result.code = std::move(output.code);
  result.symbol = std::move(output.symbol);
}

}  // namespace

CompiledKernel compile_kernel(const Kernel& kernel, const std::string& expression, int capability,
                              const Nvrtc& nvrtc, const KernelCache& cache) {
  CompiledKernel result;
  if (kernel.source.text == nullptr) {
    result.clause = "does not take expressions";
    return result;
  }
  NvrtcProgram program = program_of(kernel, expression, "");
  std::string clause = cannot_compile_because(nvrtc, capability, program, kernel.source.specific);
  const std::string key = key_of(program, expression, nvrtc.version);
  if (clause.empty() && find(cache, key, result)) return result;
  if (find(cache, key_ahead(program, expression, capability), result)) return result;
  if (clause.empty()) {
    compile_and_keep(nvrtc, program, cache, key, result);
  } else {
    result.clause = std::move(clause);
  }
  return result;
}

CompiledKernel compile_ahead(const Kernel& kernel, const std::string& expression, int capability,
                             const Nvrtc& nvrtc, const KernelCache& cache, std::string& file) {
  CompiledKernel result;
  if (kernel.source.text == nullptr) {
    result.clause = "does not take expressions";
    return result;
  }
  NvrtcProgram program = program_of(kernel, expression, "");
  result.clause = cannot_compile_because(nvrtc, capability, program, kernel.source.specific);
  const std::string key = key_ahead(program, expression, capability);
  file = cache.file_of(key).string();
  if (find(cache, key, result)) {
    result.clause.clear();
  } else if (result.clause.empty()) {
    compile_and_keep(nvrtc, program, cache, key, result);
  }
  return result;
}

namespace {

/// What this process has asked for.
struct Memory {
  struct Entry {
    std::once_flag once;
    CompiledKernel compiled;
  };
  std::mutex mutex;
  std::map<std::tuple<const Kernel*, int, std::string>, Entry> entries;  // nodes stay where they are
};
Memory& memory() {
  static Memory of_process;
  return of_process;
}

}  // namespace

bool is_compiled(const Kernel& kernel, const std::string& expression, int capability) {
  const std::scoped_lock lock(memory().mutex);
  return memory().entries.contains({&kernel, capability, expression});
}

const CompiledKernel& compile_kernel(const Kernel& kernel, const std::string& expression, int capability) {
  Memory::Entry* entry = nullptr;
  {
    const std::scoped_lock lock(memory().mutex);
    entry = &memory().entries[{&kernel, capability, expression}];
  }
  std::call_once(entry->once, [&] {
    entry->compiled = compile_kernel(kernel, expression, capability, nvrtc(), KernelCache::of_user());
  });
  return entry->compiled;
}

}  // namespace fovea::cuda
