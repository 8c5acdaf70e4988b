# The fuzz targets of the file layer, fuzz_npy and fuzz_safetensors, and fuzz_io_seeds, which makes their first corpus:
#   fuzz_io_seeds corpus && fuzz_npy -max_len=4096 -malloc_limit_mb=16 corpus/npy
if(FOVEA_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "FOVEA_FUZZ needs libFuzzer, which comes with clang; configure with CXX=clang++")
  endif()

  # The readers are built a second time, because the fuzzer is blind in code that does not count its coverage, and
  # fovea_io itself must not need the fuzzer's runtime.
  get_target_property(fovea_io_sources fovea_io SOURCES)
  get_target_property(fovea_io_directory fovea_io SOURCE_DIR)
  list(FILTER fovea_io_sources EXCLUDE REGEX "png")
  list(TRANSFORM fovea_io_sources PREPEND "${fovea_io_directory}/")
  add_library(fovea_io_fuzzed STATIC ${fovea_io_sources})
  target_include_directories(fovea_io_fuzzed PUBLIC ${fovea_io_directory}/..)
  target_compile_features(fovea_io_fuzzed PUBLIC cxx_std_20)
  target_compile_options(fovea_io_fuzzed PRIVATE -fsanitize=fuzzer-no-link)
  target_link_libraries(fovea_io_fuzzed PRIVATE fovea_warnings)

  foreach(format IN ITEMS npy safetensors)
    add_executable(fuzz_${format} ${CMAKE_CURRENT_LIST_DIR}/io_${format}_fuzz.cpp)
    target_compile_options(fuzz_${format} PRIVATE -fsanitize=fuzzer)
    target_link_options(fuzz_${format} PRIVATE -fsanitize=fuzzer)
    target_link_libraries(fuzz_${format} PRIVATE fovea_io_fuzzed fovea_warnings)
  endforeach()

  add_executable(fuzz_io_seeds ${CMAKE_CURRENT_LIST_DIR}/io_make_seeds.cpp)
  target_link_libraries(fuzz_io_seeds PRIVATE fovea_io fovea_warnings)
endif()
