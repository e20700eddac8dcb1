// SPDX-License-Identifier: Apache-2.0
// A unit of decode attention: consecutive tiles of 16 keys of a token.
#pragma once

struct Unit {
    int token_sections;  // token in the low half, units of its row in the high one; -1: none
    int first, end;      // tiles
    int slot_section;  // of several: slot of the row's first unit in the low half; number of this one in the
                       // high
};
