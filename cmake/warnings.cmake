# Every target compiles without warnings on the tested compilers, where a warning is an error. A newer compiler may have
# new warnings, which must not fail a user's build.
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
