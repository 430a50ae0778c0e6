# SPDX-License-Identifier: Apache-2.0
# `cmake --install`: libraries, headers, CMake package and pkg-config file, all relocatable.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashplan)
install(TARGETS flashplan flashplan_static
  EXPORT flashplanTargets
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY include/flashplan DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE THIRD_PARTY_LICENSES.txt DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT flashplanTargets NAMESPACE flashplan:: DESTINATION ${package_dir})

configure_package_config_file(cmake/flashplanConfig.cmake.in flashplanConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(flashplanConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/flashplanConfig.cmake
  ${PROJECT_BINARY_DIR}/flashplanConfigVersion.cmake
  DESTINATION ${package_dir})

set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pkgconfig_prefix /prefix/${pkgconfig_dir} /prefix)
set(pkgconfig_cuda_libs "")
if(FLASHPLAN_WITH_CUDA)
  set(pkgconfig_cuda_libs "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt ")
endif()
configure_file(cmake/flashplan.pc.in flashplan.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/flashplan.pc DESTINATION ${pkgconfig_dir})
