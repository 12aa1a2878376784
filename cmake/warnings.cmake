# SPDX-License-Identifier: Apache-2.0
# flash_export_warnings: link it (PRIVATE) to every target of our own C++. Warnings are errors where the tests are
# built, unless told otherwise; a user's newer compiler must not stop an install.
option(FLASH_EXPORT_WERROR "Warnings of our own C++ are errors" ${FLASH_EXPORT_TESTS})
add_library(flash_export_warnings INTERFACE)
target_compile_options(
  flash_export_warnings
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra $<$<BOOL:${FLASH_EXPORT_WERROR}>:-Werror>>)
