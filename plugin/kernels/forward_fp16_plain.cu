// SPDX-License-Identifier: Apache-2.0
#define FLASH_COMPILE_Half_Plain FLASH_COMPILE_VARIANT
#include "instantiate.h"
