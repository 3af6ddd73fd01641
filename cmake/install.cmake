# cmake --install: the library and its header, the program, and what lets other projects find
# them (CMake's find_package(fa3) and pkg-config).
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fa3)
install(TARGETS fa3 EXPORT fa3-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES include/fa3.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

install(EXPORT fa3-targets NAMESPACE fa3:: DESTINATION ${package_dir})
configure_package_config_file(cmake/fa3-config.cmake.in fa3-config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(fa3-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/fa3-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/fa3-config-version.cmake
  DESTINATION ${package_dir})

# The prefix is found from where the file lies, so the installed tree can be moved.
file(RELATIVE_PATH prefix_from_pc
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/fa3.pc.in fa3.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/fa3.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
