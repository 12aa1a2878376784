# SPDX-License-Identifier: Apache-2.0
# fetch_wheels(<requirements> <prefix> <folder>): unpacks what lies below <prefix> in the wheels named by
# <requirements> (versions and hashes pinned) into <folder>, once; sets FETCH_ERROR to the text of a failure or "".
find_package(Python3 3.9 REQUIRED COMPONENTS Interpreter)

function(fetch_wheels requirements prefix folder)
  set(FETCH_ERROR "" PARENT_SCOPE)
  file(SHA256 ${requirements} wanted)
  set(stamp ${folder}/fetched)
  if(EXISTS ${stamp})
    file(READ ${stamp} present)
    if(present STREQUAL wanted)
      return()
    endif()
  endif()
  execute_process(
    COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/scripts/fetch_wheels.py ${requirements} --below ${prefix} --into
            ${folder}
    RESULT_VARIABLE status
    ERROR_VARIABLE text)
  if(NOT status EQUAL 0)
    set(FETCH_ERROR "${text}" PARENT_SCOPE)
    return()
  endif()
  file(WRITE ${stamp} ${wanted})
endfunction()
