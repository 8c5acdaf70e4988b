# cmake --install: headers, libraries, the CMake package and the pkg-config file.
include(CMakePackageConfigHelpers)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fovea DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        COMPONENT fovea FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
set(libraries fovea fovea_static)
if(FOVEA_HAS_MPI)
  list(APPEND libraries fovea_mpi)
endif()
install(TARGETS ${libraries} EXPORT fovea_targets
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT fovea
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT fovea
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT fovea)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fovea)
install(EXPORT fovea_targets NAMESPACE fovea:: FILE fovea-targets.cmake DESTINATION ${package_dir} COMPONENT fovea)
configure_package_config_file(cmake/fovea-config.cmake.in fovea-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(fovea-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fovea-config.cmake ${PROJECT_BINARY_DIR}/fovea-config-version.cmake
        DESTINATION ${package_dir} COMPONENT fovea)

# A static link needs these beside libfovea.a.
set(FOVEA_PC_LIBS_PRIVATE "-lstdc++ -lm -pthread")
if(FOVEA_THREADING STREQUAL "openmp")
  string(APPEND FOVEA_PC_LIBS_PRIVATE " ${OpenMP_CXX_FLAGS}")
endif()
if(FOVEA_HAS_CUDA)
  install(FILES ${FOVEA_CUDART} DESTINATION ${CMAKE_INSTALL_LIBDIR}/fovea RENAME libcudart_static.a COMPONENT fovea)
  string(PREPEND FOVEA_PC_LIBS_PRIVATE "\${libdir}/fovea/libcudart_static.a -ldl -lrt ")
endif()
# The path is relative to the file, so an installation may be moved, and --prefix may be given at installation.
file(RELATIVE_PATH FOVEA_PC_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/fovea.pc.in fovea.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fovea.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT fovea)
