# Finds nvcc and the static CUDA runtime. Sets FOVEA_HAS_CUDA, and FOVEA_CUDA_CHIPS: the chips that get machine code.
# No GPU is needed to compile, and the library never asks for one when it is built.
#
# nvcc is looked for in CMAKE_CUDA_COMPILER or the environment's CUDACXX, then on PATH, in CUDA_HOME or CUDA_PATH, in
# /usr/local/cuda, and in build/cuda-toolkit, where `tools/setup.sh cuda` installs one.
set_property(CACHE FOVEA_CUDA PROPERTY STRINGS AUTO ON OFF)
set(FOVEA_CUDA_ARCHITECTURES "all" CACHE STRING
    "Chips that get machine code: all, native (the GPUs of this machine), or a list as in 80;90 (90: compute capability 9.0)")
set(all_chips 75 80 86 89 90)  # newer chips get PTX
set(FOVEA_HAS_CUDA OFF)
set(FOVEA_CUDA_SUMMARY "none (FOVEA_CUDA is OFF)")

# Chips of the GPUs that nvidia-smi lists. A GPU takes the machine code of the newest chip of `all_chips` that is not newer
# than itself; GPUs that are older than all of them do not count.
function(find_native_chips result)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE capabilities ERROR_QUIET RESULT_VARIABLE status TIMEOUT 30)
  set(chips "")
  if(status EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${capabilities}")
    foreach(capability IN LISTS capabilities)
      string(REPLACE "." "" capability ${capability})
      set(runs "")
      foreach(chip IN LISTS all_chips)
        if(chip LESS_EQUAL capability)
          set(runs ${chip})
        endif()
      endforeach()
      list(APPEND chips ${runs})
    endforeach()
    list(REMOVE_DUPLICATES chips)
    list(SORT chips COMPARE NATURAL)
  endif()
  set(${result} ${chips} PARENT_SCOPE)
endfunction()

function(find_nvcc result)
  if(CMAKE_CUDA_COMPILER)
    set(${result} ${CMAKE_CUDA_COMPILER} PARENT_SCOPE)
    return()
  endif()
  if(NOT "$ENV{CUDACXX}" STREQUAL "")
    set(${result} $ENV{CUDACXX} PARENT_SCOPE)
    return()
  endif()
  find_program(found nvcc NO_CACHE NO_CMAKE_FIND_ROOT_PATH
    HINTS ENV PATH ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
    PATHS /usr/local/cuda/bin ${PROJECT_SOURCE_DIR}/build/cuda-toolkit/nvidia/cu13/bin)
  set(${result} ${found} PARENT_SCOPE)
endfunction()

set(FOVEA_CUDA_CHIPS ${FOVEA_CUDA_ARCHITECTURES})
if(FOVEA_CUDA_ARCHITECTURES STREQUAL "native")
  find_native_chips(FOVEA_CUDA_CHIPS)
endif()
if(FOVEA_CUDA_ARCHITECTURES STREQUAL "all" OR (FOVEA_CUDA STREQUAL "ON" AND NOT FOVEA_CUDA_CHIPS))
  set(FOVEA_CUDA_CHIPS ${all_chips})
endif()

if(FOVEA_CUDA AND CMAKE_CROSSCOMPILING)
  set(FOVEA_CUDA_SUMMARY "none (cross-compiling)")
elseif(FOVEA_CUDA AND NOT FOVEA_CUDA_CHIPS)
  set(FOVEA_CUDA_SUMMARY
      "none (no GPU here; FOVEA_CUDA_ARCHITECTURES=all compiles for every chip, FOVEA_CUDA=ON does so too)")
elseif(FOVEA_CUDA)
  find_package(Python3 3.11 COMPONENTS Interpreter)
  find_nvcc(nvcc)
  set(trouble "")
  if(NOT nvcc)
    set(trouble "no nvcc was found")
  elseif(NOT Python3_FOUND)
    set(trouble "tools/make_instances.py needs Python 3.11 or later")
  else()
    set(ENV{CUDACXX} ${nvcc})
    # CMake would compile its test program for an architecture that the newest compilers have dropped.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 75)
    endif()
    if(NOT CMAKE_CUDA_COMPILER)
      include(CheckLanguage)
      check_language(CUDA)  # nvcc may refuse the host's g++
    endif()
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
      if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)  # the first whose front end accepts the kernels
        set(trouble "${nvcc} is version ${CMAKE_CUDA_COMPILER_VERSION}, 12.8 is needed")
      endif()
    else()
      set(trouble "${nvcc} does not work with this compiler (see CMakeFiles/CMakeError.log)")
    endif()
  endif()

  if(NOT trouble)
    find_library(FOVEA_CUDART cudart_static NO_CMAKE_FIND_ROOT_PATH
      HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES}
      DOC "The static CUDA runtime")
    if(NOT FOVEA_CUDART)
      set(trouble "libcudart_static.a is not beside ${nvcc}")
    endif()
  endif()

  if(trouble AND FOVEA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FOVEA_CUDA is ON, but ${trouble}. `tools/setup.sh cuda` puts an nvcc into build/cuda-toolkit.")
  elseif(trouble)
    set(FOVEA_CUDA_SUMMARY "none (${trouble})")
  else()
    set(FOVEA_HAS_CUDA ON)
    list(JOIN FOVEA_CUDA_CHIPS ", " listed)
    set(FOVEA_CUDA_SUMMARY "sm_75 to newest, machine code for ${listed}, by nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
endif()

if(NOT FOVEA_HAS_CUDA)
  return()
endif()

# Another version of ptxas may spill where the tested one does not. That must not fail a user's build.
if(CMAKE_CUDA_COMPILER_VERSION MATCHES "^13\\.0\\.")
  set(tested_nvcc ON)
else()
  set(tested_nvcc OFF)
endif()
option(FOVEA_CUDA_STRICT "Spills, local memory and warnings of nvcc and ptxas are errors" ${tested_nvcc})

# Headers and library of the runtime. The static runtime loads the driver when it is first used, so a program that links
# it starts on machines without a driver.
add_library(fovea_cudart INTERFACE)
target_include_directories(fovea_cudart SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(fovea_cudart INTERFACE ${FOVEA_CUDART} Threads::Threads ${CMAKE_DL_LIBS} rt)

# CMake 3.25 does not know that nvcc has C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)

# Instructions are the same without lines, compiling takes a fifth less time, and the compressed code a third of the room.
option(FOVEA_CUDA_LINEINFO "Kernels of the library name their source lines to profilers; the ladder's always do" OFF)
# Flags of all device code, the library's and the tests'. Each target adds its architectures.
add_library(fovea_cuda_flags INTERFACE)
target_compile_options(fovea_cuda_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr $<$<BOOL:${FOVEA_CUDA_LINEINFO}>:-lineinfo>
    $<$<BOOL:${FOVEA_CUDA_STRICT}>:-Werror=all-warnings>
    -Xcompiler=-Wall,-Wextra$<$<BOOL:${FOVEA_CUDA_STRICT}>:,-Werror>>)
set(FOVEA_PTXAS_FLAGS -Xptxas=-v,-warn-spills,-warn-lmem-usage)

# ptxas reports each kernel. The launcher keeps the reports and fails on spills, local memory and lost performance.
set(FOVEA_NVCC_LAUNCHER ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/resources.py compile)
if(NOT FOVEA_CUDA_STRICT)
  list(APPEND FOVEA_NVCC_LAUNCHER --report-only)
endif()
# Host code is the same for every chip, so a build that only asks whether a chip's kernels compile does without it.
option(FOVEA_CUDA_DEVICE_ONLY "Compile no host code of CUDA units and link nothing: the target device_code is all there is" OFF)
if(FOVEA_CUDA_DEVICE_ONLY)
  list(APPEND FOVEA_NVCC_LAUNCHER --device-only)
endif()
list(APPEND FOVEA_NVCC_LAUNCHER --)
set(FOVEA_CUDA_COMPRESSION "size" CACHE STRING "How nvcc compresses machine code: size, speed (compiles a tenth faster), none")

# Device code of tests: the machine code of sm_80 runs on every chip 8.x, PTX on chips that are newer than 9.0.
set(FOVEA_CUDA_TEST_GENCODE -gencode=arch=compute_80,code=[sm_80,sm_90,compute_80])
