// SPDX-License-Identifier: Apache-2.0
// Writes past the end of an array of its own. args: index.
#include "api/dataflow/dataflow_api.h"

void kernel_main() {
    volatile uint32_t four[4] = {0, 0, 0, 0};
    four[get_arg_val<uint32_t>(0)] = 1;
}
