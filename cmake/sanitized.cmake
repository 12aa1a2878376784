# SPDX-License-Identifier: Apache-2.0
# Test programs that are compiled whole, library and test, with sanitizers, whose findings end them. They are built by
# the first test that needs one (or by the target sanitized_programs) and not by an install.
find_package(Threads REQUIRED)
add_custom_target(sanitized_programs)
add_test(NAME build_sanitized COMMAND ${CMAKE_COMMAND} --build ${CMAKE_BINARY_DIR} --target sanitized_programs)
set_tests_properties(build_sanitized PROPERTIES FIXTURES_SETUP sanitized_programs PROCESSORS 2)

# sanitized_program(<program> <sanitizers> <source>...): one, with -fsanitize=<sanitizers>.
function(sanitized_program program sanitizers)
  add_executable(${program} EXCLUDE_FROM_ALL ${ARGN})
  add_dependencies(sanitized_programs ${program})
  target_include_directories(${program} PRIVATE ${PROJECT_SOURCE_DIR}/plugin ${PROJECT_SOURCE_DIR}/tests/plugin)
  target_compile_options(${program} PRIVATE -fsanitize=${sanitizers} -fno-sanitize-recover=all -O1 -g1)
  target_link_options(${program} PRIVATE -fsanitize=${sanitizers})
  target_link_libraries(${program} PRIVATE flash_export_warnings tensorrt_headers CUDA::cudart_static Threads::Threads)
  set_target_properties(${program} PROPERTIES CXX_STANDARD 20)
endfunction()

# sanitized_test(<name> <command>...): a test that runs one.
function(sanitized_test name)
  add_test(NAME ${name} COMMAND ${ARGN})
  set_tests_properties(${name} PROPERTIES FIXTURES_REQUIRED sanitized_programs)
endfunction()
