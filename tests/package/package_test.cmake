# Builds and runs a C and a C++ program against the installed shared and static library, found by find_package and by pkg-config.
set(prefix ${WORK_DIR}/prefix)
file(REMOVE_RECURSE ${WORK_DIR})

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE output)
  set(output "${output}" PARENT_SCOPE)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix} --component fovea)

# Moves the installation, so that a path to its first place fails.
file(RENAME ${prefix} ${WORK_DIR}/moved)
set(prefix ${WORK_DIR}/moved)

foreach(target fovea::fovea fovea::static)
  string(REPLACE "::" "_" name ${target})
  set(build ${WORK_DIR}/find_package_${name})
  run(${CMAKE_COMMAND} -S ${CONSUMER_DIR} -B ${build} -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${prefix}
      -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DFOVEA_TARGET=${target})
  run(${CMAKE_COMMAND} --build ${build})
  foreach(program consumer_c consumer_cpp)
    run(${build}/${program})
    message(STATUS "find_package, ${target}, ${program}: ${output}")
  endforeach()
endforeach()

if(NOT PKG_CONFIG)
  message(FATAL_ERROR "pkg-config is not installed, so fovea.pc cannot be tested (Debian: pkg-config)")
endif()
file(GLOB_RECURSE pc_file ${prefix}/fovea.pc)
get_filename_component(pc_dir ${pc_file} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${pc_dir})

function(pkg_config)
  run(${PKG_CONFIG} ${ARGV} fovea)
  string(STRIP "${output}" output)
  separate_arguments(output UNIX_COMMAND "${output}")
  set(output ${output} PARENT_SCOPE)
endfunction()

foreach(linkage shared static)
  if(linkage STREQUAL "shared")
    pkg_config(--cflags)
    set(cflags ${output})
    pkg_config(--libs)
    set(libs ${output})
    pkg_config(--variable=libdir)
    list(APPEND libs -Wl,-rpath,${output})
  else()
    pkg_config(--variable=static_cflags)
    set(cflags ${output})
    pkg_config(--variable=static_libs)
    set(libs ${output})
  endif()
  run(${C_COMPILER} -std=c11 -Wall -Wextra -Werror ${cflags} ${CONSUMER_DIR}/consumer.c -o ${WORK_DIR}/c_${linkage}
      ${libs} -lm)
  run(${CXX_COMPILER} -std=c++20 -Wall -Wextra -Werror ${cflags} ${CONSUMER_DIR}/consumer.cpp
      -o ${WORK_DIR}/cpp_${linkage} ${libs})
  foreach(program c_${linkage} cpp_${linkage})
    run(${WORK_DIR}/${program})
    message(STATUS "pkg-config, ${program}: ${output}")
  endforeach()
endforeach()
