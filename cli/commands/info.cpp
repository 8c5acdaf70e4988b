// `fovea info`: the library and the machine.
#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <memory>
#include <sstream>

#include "cli/commands/commands.hpp"
#include "cli/options/options.hpp"
#include "cli/terminal/text.hpp"
#include "fovea/fovea.hpp"

namespace fovea::cli {
namespace {

/// The part of fovea_machine's line between `label` and the next semicolon.
std::string part_of(const std::string& machine, const std::string& label) {
  const size_t at = machine.find(label);
  if (at == std::string::npos) return "";
  const size_t start = machine.find_first_not_of(' ', at + label.size());
  return start == std::string::npos ? "" : machine.substr(start, machine.find(';', start) - start);
}

Exit run_info(bool json) {
  const std::string line(machine());
  const std::string processor = line.substr(0, line.find(';'));
  const std::string sets = part_of(line, "instruction sets:");
  if (json) {
    Json out = {{"version", version()}, {"machine", line}, {"processor", processor}};
    out["instruction_sets"] = Json::array();
    std::istringstream words(sets);
    for (std::string word; words >> word;) out["instruction_sets"].push_back(word);
    out["threads"] = default_threads();
    out["cuda"] = cuda_versions();
    out["gpus"] = Json::array();
    for (const std::string& device : cuda_devices()) out["gpus"].push_back(device);
    out["backends"] = Json::array();
    for (const BackendInfo& backend : backends()) {
      out["backends"].push_back({{"name", backend.name},
                                 {"available", backend.unavailable_because.empty()},
                                 {"unavailable_because", backend.unavailable_because}});
    }
    print_json(out);
    return Exit::ok;
  }
  fmt::print("version           {}\n", version());
  fmt::print("processor         {}\n", processor);
  if (!sets.empty()) fmt::print("instruction sets  {}\n", sets);
  fmt::print("threads           {}\n", default_threads());
  fmt::print("cuda              {}\n", cuda_versions());
  int id = 0;
  for (const std::string& device : cuda_devices()) fmt::print("  cuda:{:<11}{}\n", id++, device);
  fmt::print("backends          in order of preference:\n");
  for (const BackendInfo& backend : backends()) {
    fmt::print(
        "  {:<16}{}\n", backend.name,
        backend.unavailable_because.empty() ? "available" : "not here: " + backend.unavailable_because);
  }
  return Exit::ok;
}

}  // namespace

void add_info(CLI::App& program, Action& action) {
  const auto json = std::make_shared<bool>(false);
  CLI::App* command =
      program.add_subcommand("info", "Version, machine, backends, and why a backend is not available");
  add_json_option(*command, *json);
  command->callback([json, &action] { action = [json] { return run_info(*json); }; });
}

}  // namespace fovea::cli
