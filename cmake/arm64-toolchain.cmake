# Builds for 64-bit ARM on another Linux machine: g++-aarch64-linux-gnu compiles, qemu-user runs the programs.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE BOTH)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

# Header-only libraries serve every processor. /usr/include holds this machine's headers as well, so a folder of links
# names the wanted ones only.
set(portable_headers ${CMAKE_CURRENT_LIST_DIR}/../build/arm64-headers)
foreach(header hwy nlohmann)
  if(EXISTS /usr/include/${header} AND NOT EXISTS ${portable_headers}/${header})
    file(MAKE_DIRECTORY ${portable_headers})
    file(CREATE_LINK /usr/include/${header} ${portable_headers}/${header} SYMBOLIC)
  endif()
endforeach()
file(REAL_PATH ${portable_headers} portable_headers)
list(APPEND CMAKE_INCLUDE_PATH ${portable_headers})
# GCC 12 warns of loops over int64_t with a remainder, each of which ends long before an address overflows.
set(CMAKE_CXX_FLAGS_INIT "-isystem ${portable_headers} -Wno-aggressive-loop-optimizations")
