# Configuration and daemon.

sluice_test(NAME config_test SUITE unit SOURCES config_test.cc LIBS sluice_config)
target_compile_definitions(config_test PRIVATE SLUICE_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
