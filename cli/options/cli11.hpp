// Names of CLI11 for headers. CLI11's own header takes seconds to compile, so only the files that add options include it.
#pragma once

namespace CLI {
class App;
class Option;
}  // namespace CLI
