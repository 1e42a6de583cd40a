# Configuration and daemon.

sluice_test(NAME config_test SUITE unit SOURCES config_test.cc LIBS sluice_config)
target_compile_definitions(config_test PRIVATE SLUICE_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
sluice_test(NAME daemon_descriptor_test SUITE unit SOURCES daemon_descriptor_test.cc LIBS sluice_engine)
sluice_test(NAME daemon_refusals_test SUITE unit THREADS SOURCES daemon_refusals_test.cc LIBS sluice_daemon nlohmann_json::nlohmann_json)
sluice_test(NAME daemon_jobs_test SUITE unit THREADS SOURCES daemon_jobs_test.cc LIBS sluice_daemon sluice nlohmann_json::nlohmann_json)
sluice_test(NAME daemon_carry_test SUITE unit THREADS SOURCES daemon_carry_test.cc LIBS sluice_daemon sluice nlohmann_json::nlohmann_json)
sluice_test(NAME daemon_metrics_test SUITE unit THREADS SOURCES daemon_metrics_test.cc LIBS sluice_daemon nlohmann_json::nlohmann_json)
if(TARGET sluicectl_parts)
  sluice_test(NAME sluicectl_test SUITE unit SOURCES sluicectl_test.cc LIBS sluicectl_parts)
endif()
