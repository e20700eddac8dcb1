// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compile_time_args.h"
#include "emulator/common.h"

// Compile-time settings of a compute kernel, from its configuration.
#ifndef EMULATOR_FP32_DEST
#define EMULATOR_FP32_DEST false
#endif
constexpr bool DST_ACCUM_MODE = EMULATOR_FP32_DEST;
constexpr bool UnpackToDestEn = true;
enum class SrcOrder { Regular, Reverse };
enum class BroadcastType { NONE = 0, COL = 1, ROW = 2, SCALAR = 3 };
enum class EltwiseBinaryType { ELWADD = 0, ELWSUB = 1, ELWMUL = 2 };
enum class EltwiseBinaryReuseDestType { NONE, DEST_TO_SRCA, DEST_TO_SRCB };
enum class VectorMode { None = 0, R = 1, C = 2, RC = 4, RC_custom = 6 };
namespace ckernel {
using ::BroadcastType;
using ::EltwiseBinaryReuseDestType;
using ::EltwiseBinaryType;
using ::VectorMode;
}  // namespace ckernel
