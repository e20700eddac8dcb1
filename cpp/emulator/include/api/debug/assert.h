// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "emulator/common.h"

#define ASSERT(condition, ...)             \
    do {                                   \
        if (!(condition)) {                \
            emu_at(__FILE__, __LINE__);    \
            emu_assert_failed(#condition); \
        }                                  \
    } while (false)
