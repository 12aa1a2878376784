# SPDX-License-Identifier: Apache-2.0
# FLASH_EXPORT_LIBFUZZER: a clang++ that has libFuzzer (Debian and Ubuntu: clang and libclang-rt-*-dev), or "".
# GCC, which compiles everything else, has none.
set(names clang++)
foreach(version RANGE 22 14 -1)
  list(APPEND names clang++-${version})
endforeach()
find_program(FLASH_EXPORT_CLANG NAMES ${names})
set(FLASH_EXPORT_LIBFUZZER "")
if(FLASH_EXPORT_CLANG)
  set(trial ${CMAKE_CURRENT_BINARY_DIR}/libfuzzer_trial)
  file(WRITE ${trial}.cpp "#include <vector>\nextern \"C\" int LLVMFuzzerTestOneInput(unsigned char const*, std::size_t) "
                          "{ return 0; }\n")
  execute_process(COMMAND ${FLASH_EXPORT_CLANG} -fsanitize=fuzzer,address,undefined ${trial}.cpp -o ${trial}
                  RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
  if(failed EQUAL 0)
    set(FLASH_EXPORT_LIBFUZZER ${FLASH_EXPORT_CLANG})
  endif()
endif()
message(STATUS "libFuzzer: ${FLASH_EXPORT_LIBFUZZER}")
