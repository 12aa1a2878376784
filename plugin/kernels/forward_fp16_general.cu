// SPDX-License-Identifier: Apache-2.0
#define FLASH_COMPILE_Half_General FLASH_COMPILE_VARIANT
#include "instantiate.h"
