# 64-bit ARM from another Linux machine: g++-aarch64-linux-gnu, and qemu-user runs what was built.
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

# Libraries that are headers only serve every processor, but /usr/include as a whole would bring the other machine's
# headers: a folder of links to those that are wanted.
set(portable_headers ${CMAKE_CURRENT_LIST_DIR}/../build/arm64-headers)
foreach(header hwy nlohmann)
  if(EXISTS /usr/include/${header} AND NOT EXISTS ${portable_headers}/${header})
    file(MAKE_DIRECTORY ${portable_headers})
    file(CREATE_LINK /usr/include/${header} ${portable_headers}/${header} SYMBOLIC)
  endif()
endforeach()
file(REAL_PATH ${portable_headers} portable_headers)
list(APPEND CMAKE_INCLUDE_PATH ${portable_headers})
set(CMAKE_CXX_FLAGS_INIT "-isystem ${portable_headers}")
