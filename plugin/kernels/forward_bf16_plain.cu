// SPDX-License-Identifier: Apache-2.0
#define FLASH_COMPILE_BFloat_Plain FLASH_COMPILE_VARIANT
#include "instantiate.h"
