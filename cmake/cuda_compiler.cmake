# SPDX-License-Identifier: Apache-2.0
# Finds nvcc and enables CUDA: CMAKE_CUDA_COMPILER or CUDACXX, then the machine's own (PATH, CUDA_HOME,
# /usr/local/cuda), else NVIDIA's wheels from PyPI, unpacked into the build folder.
include(fetch)

option(FLASH_EXPORT_NVCC_FROM_PYPI "Take nvcc from PyPI even where the machine has one" OFF)

if(FLASH_EXPORT_NVCC_FROM_PYPI OR (NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX}))
  if(NOT FLASH_EXPORT_NVCC_FROM_PYPI)
    find_program(FLASH_EXPORT_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  endif()
  if(NOT FLASH_EXPORT_NVCC)
    message(STATUS "Fetching nvcc from PyPI")
    set(toolkit ${CMAKE_BINARY_DIR}/cuda_toolkit)
    fetch_wheels(${PROJECT_SOURCE_DIR}/cmake/cuda_toolkit.txt nvidia/cu13 ${toolkit})
    if(FETCH_ERROR)
      message(
        FATAL_ERROR
          "cannot compile the CUDA kernels\n  where nvcc\n  got   none in CUDACXX, PATH, CUDA_HOME or /usr/local/cuda, "
          "and from PyPI: ${FETCH_ERROR}\n  need  nvcc 13 (12.8 at least)\n  do    install the CUDA toolkit, or name "
          "nvcc in the environment variable CUDACXX")
    endif()
    # Two links that a toolkit has and the wheels have not: nvcc.profile looks into lib64, CMake for libcudart.so.
    file(CREATE_LINK lib ${toolkit}/lib64 SYMBOLIC)
    file(CREATE_LINK libcudart.so.13 ${toolkit}/lib/libcudart.so SYMBOLIC)
    set(FLASH_EXPORT_NVCC ${toolkit}/bin/nvcc)
  endif()
  set(CMAKE_CUDA_COMPILER ${FLASH_EXPORT_NVCC})
endif()

set(CMAKE_CUDA_ARCHITECTURES ${FLASH_EXPORT_CUDA_ARCHITECTURES})
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
find_package(CUDAToolkit 12.8 REQUIRED)
