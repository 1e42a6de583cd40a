# Installs libsluice into a fresh prefix and builds the consumers against it: by find_package and by pkg-config.
#   cmake -DBUILD=<build tree> -DSOURCE=<this folder> -DWORK=<scratch> -DCC=.. -DCXX=.. -DLIBDIR=lib -P run.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed (${result}): ${ARGN}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --component client --prefix ${WORK}/prefix)
foreach(file include/sluice.h include/sluice.hpp ${LIBDIR}/libsluice.so ${LIBDIR}/libsluice.so.0
             ${LIBDIR}/pkgconfig/sluice.pc)
  if(NOT EXISTS ${WORK}/prefix/${file})
    message(FATAL_ERROR "${file} was not installed")
  endif()
endforeach()
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G Ninja -DCMAKE_C_COMPILER=${CC} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_PREFIX_PATH=${WORK}/prefix)
run(${CMAKE_COMMAND} --build ${WORK}/build)
foreach(program consumer_c consumer_cxx)
  run(${WORK}/build/${program})
  message(STATUS "${program}: ${output}")
endforeach()

find_program(PKG_CONFIG pkg-config REQUIRED)
# The prefix in sluice.pc is the configured one; here it lies elsewhere.
run(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${WORK}/prefix/${LIBDIR}/pkgconfig
    ${PKG_CONFIG} --define-variable=prefix=${WORK}/prefix --cflags --libs sluice)
string(STRIP "${output}" flags)
separate_arguments(flags UNIX_COMMAND "${flags}")
run(${CC} -std=c11 ${SOURCE}/consumer.c -o ${WORK}/by_pkg_config ${flags} -Wl,-rpath,${WORK}/prefix/${LIBDIR})
run(${WORK}/by_pkg_config)
message(STATUS "by pkg-config: ${output}")
