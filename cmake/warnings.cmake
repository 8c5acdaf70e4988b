# Every target of this project is warning-free on g++ and clang.
add_library(fovea_warnings INTERFACE)
target_compile_options(fovea_warnings INTERFACE
  -Wall -Wextra -Wconversion -Wshadow -Werror
  $<$<CXX_COMPILER_ID:GNU>:-Wno-psabi>)
