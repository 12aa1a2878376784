# SPDX-License-Identifier: Apache-2.0
# tensorrt_headers: TensorRT's C++ headers (10.14 or newer) as system headers; nothing of TensorRT is linked.
# TENSORRT_ROOT (CMake or environment), then the system, else the Apache-2.0 headers in a wheel on PyPI.
include(fetch)

set(TENSORRT_ROOT "$ENV{TENSORRT_ROOT}" CACHE PATH "Where TensorRT or its headers are unpacked")
find_path(
  TENSORRT_INCLUDE_DIR NvInferRuntimePlugin.h
  HINTS ${TENSORRT_ROOT}
  PATH_SUFFIXES include include/x86_64-linux-gnu)
if(TENSORRT_ROOT AND NOT TENSORRT_INCLUDE_DIR)
  message(FATAL_ERROR "cannot compile the TensorRT plugin\n  where TENSORRT_ROOT=${TENSORRT_ROOT}\n  got   no "
                      "NvInferRuntimePlugin.h there nor in its include folder\n  need  TensorRT 10.14 or newer\n  do    "
                      "correct TENSORRT_ROOT, or leave it out to take the headers from PyPI")
endif()
if(NOT TENSORRT_INCLUDE_DIR)
  set(folder ${CMAKE_BINARY_DIR}/tensorrt_headers)
  fetch_wheels(${PROJECT_SOURCE_DIR}/cmake/tensorrt_headers.txt kernel_lens/include/tensorrt ${folder})
  if(FETCH_ERROR)
    message(FATAL_ERROR "cannot compile the TensorRT plugin\n  got   no TensorRT headers on this machine, and from "
                        "PyPI: ${FETCH_ERROR}\n  need  NvInferRuntime.h of TensorRT 10.14 or newer\n  do    unpack "
                        "TensorRT and name its folder in TENSORRT_ROOT")
  endif()
  set(TENSORRT_INCLUDE_DIR ${folder} CACHE PATH "Where NvInferRuntime.h lies" FORCE)
endif()
message(STATUS "TensorRT headers: ${TENSORRT_INCLUDE_DIR}")

add_library(tensorrt_headers INTERFACE)
target_include_directories(tensorrt_headers SYSTEM INTERFACE ${TENSORRT_INCLUDE_DIR} ${CUDAToolkit_INCLUDE_DIRS})
