# SPDX-License-Identifier: Apache-2.0
# tensorrt_headers: TensorRT's C++ headers as system headers; nothing of TensorRT is linked. TENSORRT_ROOT (CMake or
# environment), then the system, else the Apache-2.0 headers in a wheel on PyPI.
include(fetch)

set(TENSORRT_ROOT "$ENV{TENSORRT_ROOT}" CACHE PATH "Where TensorRT or its headers are unpacked")
find_path(
  TENSORRT_INCLUDE_DIR NvInferRuntime.h
  HINTS ${TENSORRT_ROOT}
  PATH_SUFFIXES include include/x86_64-linux-gnu include/aarch64-linux-gnu)

# Headers before TensorRT 10 have no IPluginV3: found on a system they are passed over, named by the user they are an
# error.
set(newest_class "")
if(TENSORRT_INCLUDE_DIR)
  file(STRINGS ${TENSORRT_INCLUDE_DIR}/NvInferRuntime.h newest_class REGEX "class IPluginCreatorV3One")
endif()
if(TENSORRT_ROOT AND NOT newest_class)
  message(
    FATAL_ERROR
      "cannot compile the TensorRT plugin\n  where TENSORRT_ROOT=${TENSORRT_ROOT}\n  got   no NvInferRuntime.h with "
      "IPluginCreatorV3One there nor in its include folder\n  need  the headers of TensorRT 10.14 or newer\n  do    "
      "correct TENSORRT_ROOT, or leave it out to take the headers from PyPI")
endif()
if(NOT newest_class)
  set(folder ${CMAKE_BINARY_DIR}/tensorrt_headers)
  fetch_wheels(${PROJECT_SOURCE_DIR}/cmake/tensorrt_headers.txt kernel_lens/include/tensorrt ${folder})
  if(FETCH_ERROR)
    message(
      FATAL_ERROR
        "cannot compile the TensorRT plugin\n  where include/NvInferRuntime.h\n  got   none of TensorRT 10 on this "
        "machine, and from PyPI: ${FETCH_ERROR}\n  need  the headers of TensorRT 10.14 or newer\n  do    unpack "
        "TensorRT and name its folder in TENSORRT_ROOT")
  endif()
  set(TENSORRT_INCLUDE_DIR ${folder})
endif()
message(STATUS "TensorRT headers: ${TENSORRT_INCLUDE_DIR}")

add_library(tensorrt_headers INTERFACE)
target_include_directories(tensorrt_headers SYSTEM INTERFACE ${TENSORRT_INCLUDE_DIR} ${CUDAToolkit_INCLUDE_DIRS})
