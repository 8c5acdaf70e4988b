# Finds nvcc and the static CUDA runtime, and sets FOVEA_HAS_CUDA. Sources of the library never ask for a GPU to be built.
#
# nvcc is looked for in: CMAKE_CUDA_COMPILER or the environment's CUDACXX, PATH, CUDA_HOME or CUDA_PATH, /usr/local/cuda,
# and build/cuda-toolkit, where `tools/setup.sh cuda` puts one.
set_property(CACHE FOVEA_CUDA PROPERTY STRINGS AUTO ON OFF)
set(FOVEA_CUDA_ARCHITECTURES "75;80;86;89;90" CACHE STRING
    "Architectures that get machine code (90 means compute capability 9.0); newer ones get PTX")
set(FOVEA_HAS_CUDA OFF)
set(FOVEA_CUDA_SUMMARY "none (FOVEA_CUDA is OFF)")

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

if(FOVEA_CUDA AND CMAKE_CROSSCOMPILING)
  set(FOVEA_CUDA_SUMMARY "none (cross-compiling)")
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
    # CMake's own test program would otherwise be compiled for an architecture that the newest compilers have dropped.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 75)
    endif()
    if(NOT CMAKE_CUDA_COMPILER)
      include(CheckLanguage)
      check_language(CUDA)  # a compiler that does not accept this host's g++ is no compiler
    endif()
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
      if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)  # the first whose front end takes what the kernels use
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
    list(JOIN FOVEA_CUDA_ARCHITECTURES ", " listed)
    set(FOVEA_CUDA_SUMMARY "sm_75 to newest, machine code for ${listed}, by nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
endif()

if(NOT FOVEA_HAS_CUDA)
  return()
endif()

# ptxas of other versions may spill where that of the tested one does not, which is no reason to fail a user's build.
if(CMAKE_CUDA_COMPILER_VERSION MATCHES "^13\\.0\\.")
  set(tested_nvcc ON)
else()
  set(tested_nvcc OFF)
endif()
option(FOVEA_CUDA_STRICT "Spills, local memory and warnings of nvcc and ptxas are errors" ${tested_nvcc})

# Headers and library of the runtime. The library asks the driver for its entry points when it is first used, so that what
# links it starts on machines without a driver.
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

# How all device code is compiled: kernels of the library, and tests. Which architectures is said by each.
add_library(fovea_cuda_flags INTERFACE)
target_compile_options(fovea_cuda_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo
    $<$<BOOL:${FOVEA_CUDA_STRICT}>:-Werror=all-warnings>
    -Xcompiler=-Wall,-Wextra$<$<BOOL:${FOVEA_CUDA_STRICT}>:,-Werror>>)
set(FOVEA_PTXAS_FLAGS -Xptxas=-v,-warn-spills,-warn-lmem-usage)

# Device code of tests: SASS for the oldest chip of the sm_80 class runs on its successors of the same major version, and
# PTX on all others.
set(FOVEA_CUDA_TEST_GENCODE -gencode=arch=compute_80,code=[sm_80,sm_90,compute_80])
