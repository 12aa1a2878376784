// SPDX-License-Identifier: Apache-2.0
#define FLASH_COMPILE_Half_Paged FLASH_COMPILE_VARIANT
#include "instantiate.h"
