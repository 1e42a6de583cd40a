# lib/client.
sluice_test(NAME client_parts_test SUITE unit SOURCES client_parts_test.cc LIBS sluice_client THREADS)
sluice_test(NAME client_api_test SUITE unit SOURCES client_api_test.cc client_c11.c fake_daemon.cc LIBS sluice sluice_ipc
            THREADS DEPENDS sluice-example)
target_compile_definitions(client_api_test PRIVATE SLUICE_EXAMPLE="$<TARGET_FILE:sluice-example>")
sluice_test(NAME client_life_test SUITE unit SOURCES client_life_test.cc fake_daemon.cc LIBS sluice sluice_ipc THREADS
            TIMEOUT 240)
set_source_files_properties(client_c11.c PROPERTIES COMPILE_OPTIONS "-std=c11;-pedantic-errors;-Wstrict-prototypes")
sluice_test(NAME client_abi_test SUITE unit SOURCES client_abi_test.cc LIBS sluice)
target_compile_definitions(client_abi_test PRIVATE SLUICE_LIBRARY="$<TARGET_FILE:sluice>"
                           SLUICE_HEADER="${CMAKE_SOURCE_DIR}/lib/client/sluice.h")
if(SLUICE_SANITIZE)
  target_compile_definitions(client_abi_test PRIVATE SLUICE_SANITIZED)
endif()
# Sanitized objects would ask the consumers for the sanitizers' run-time.
if(NOT SLUICE_SANITIZE)
  add_test(NAME client_package_test
           COMMAND ${CMAKE_COMMAND} -DBUILD=${CMAKE_BINARY_DIR} -DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}/client_package
                   -DWORK=${CMAKE_CURRENT_BINARY_DIR}/client_package -DCC=${CMAKE_C_COMPILER} -DCXX=${CMAKE_CXX_COMPILER}
                   -DLIBDIR=${CMAKE_INSTALL_LIBDIR} -P ${CMAKE_CURRENT_SOURCE_DIR}/client_package/run.cmake)
  set_tests_properties(client_package_test PROPERTIES LABELS unit TIMEOUT 180)
  add_dependencies(tests_unit sluice)
endif()
