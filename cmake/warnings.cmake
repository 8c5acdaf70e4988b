# Every target of this project is warning-free on the compilers that it is tested with; newer ones may know warnings
# that nobody has seen, which are no reason to fail a user's build.
if((CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION MATCHES "^12\\.")
   OR (CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION MATCHES "^14\\."))
  set(tested_compiler ON)
else()
  set(tested_compiler OFF)
endif()
option(FOVEA_WERROR "Warnings are errors" ${tested_compiler})

add_library(fovea_warnings INTERFACE)
target_compile_options(fovea_warnings INTERFACE
  -Wall -Wextra -Wconversion -Wshadow
  $<$<BOOL:${FOVEA_WERROR}>:-Werror>
  $<$<CXX_COMPILER_ID:GNU>:-Wno-psabi>)
