// SPDX-License-Identifier: Apache-2.0
// The vector unit: functions of tiles in DST, in fp32, rounded to DST's format at the end.
#include <algorithm>
#include <cmath>

#include "compute.hpp"

using namespace emulator;

namespace {

constexpr std::uint64_t kSimpleCycles = 120, kFunctionCycles = 900;

float evaluate(std::uint32_t op, float x, float parameter) {
    switch (op) {
        case SFPU_SILU:
            return x / (1.0f + std::exp(-x));
        case SFPU_SIGMOID:
            return 1.0f / (1.0f + std::exp(-x));
        case SFPU_EXP:
            return std::exp(x);
        case SFPU_RECIP:
            return 1.0f / x;
        case SFPU_SQRT:
            return std::sqrt(x);
        case SFPU_RSQRT:
            return 1.0f / std::sqrt(x);
        case SFPU_LOG:
            return std::log(x);
        case SFPU_TANH:
            return std::tanh(x);
        case SFPU_GELU:
            return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
        case SFPU_RELU:
            return std::max(x, 0.0f);
        case SFPU_ABS:
            return std::fabs(x);
        case SFPU_SQUARE:
            return x * x;
        case SFPU_NEGATIVE:
            return -x;
        case SFPU_ADD_SCALAR:
            return x + parameter;
        case SFPU_SUB_SCALAR:
            return x - parameter;
        case SFPU_MUL_SCALAR:
            return x * parameter;
        case SFPU_DIV_SCALAR:
            return x * parameter;  // the kernel passes the reciprocal
        case SFPU_RSUB_SCALAR:
            return parameter - x;
        case SFPU_FILL:
            return parameter;
        default:
            return x;
    }
}

float cast(float x, std::uint32_t from, std::uint32_t to) {
    if (is_integer(from) && is_integer(to)) {
        return x;
    }
    if (is_integer(from)) {
        const std::uint32_t bits = bits_of(x);
        return from == Int32 ? static_cast<float>(static_cast<std::int32_t>(bits)) : static_cast<float>(bits);
    }
    if (is_integer(to)) {
        const double whole = std::trunc(static_cast<double>(x));
        if (to == Int32) {
            return float_of(static_cast<std::uint32_t>(
                static_cast<std::int32_t>(std::clamp(whole, -2147483648.0, 2147483647.0))));
        }
        const double most = to == UInt32 ? 4294967295.0 : to == UInt16 ? 65535.0 : 255.0;
        return float_of(static_cast<std::uint32_t>(std::clamp(whole, 0.0, most)));
    }
    return x;
}

float combine(std::uint32_t op, float a, float b) {
    switch (op) {
        case ADD:
            return a + b;
        case SUB:
            return a - b;
        case MUL:
            return a * b;
        case DIV:
            return a / b;
        case RSUB:
            return b - a;
        case MAXIMUM:
            return std::max(a, b);
        case MINIMUM:
            return std::min(a, b);
        default:
            return a;
    }
}

bool ready(Compute& state, std::uint32_t wanted, const char* call) {
    if (!state.started) {
        machine.report("missing-init", text("%s before compute_kernel_hw_startup", call));
    }
    if (state.sfpu != wanted) {
        machine.report("missing-init", text("%s: the last SFPU init was for another function", call));
    }
    return true;
}

}  // namespace

extern "C" {

void emu_sfpu_init(std::uint32_t op) {
    if (Compute* state = compute_state("SFPU init")) {
        state->sfpu = op;
        spend(20);
    }
}

void emu_sfpu_unary(std::uint32_t op, std::uint32_t dst, std::uint32_t parameter) {
    Compute* state = compute_state("SFPU function");
    if (state == nullptr) {
        return;
    }
    ready(*state, op >= SFPU_ADD_SCALAR && op <= SFPU_RSUB_SCALAR ? std::uint32_t{SFPU_SCALAR} : op,
          "SFPU function");
    Tile* tile = dst_for_math(*state, dst, "SFPU function", op != SFPU_FILL);
    if (tile == nullptr) {
        return;
    }
    float* value = &tile->at[0][0];
    const std::uint32_t from = parameter >> 8 & 255, to = parameter & 255;
    for (int i = 0; i < 1024; ++i) {
        value[i] =
            op == SFPU_TYPECAST ? cast(value[i], from, to) : evaluate(op, value[i], float_of(parameter));
    }
    if (op != SFPU_TYPECAST || !is_integer(to)) {
        settle(*state, dst);
    }
    ++machine.role->core->counters.sfpu_tiles;
    const bool function = op <= SFPU_GELU;
    spend(function ? kFunctionCycles : kSimpleCycles);
}

void emu_sfpu_binary(std::uint32_t op, std::uint32_t dst0, std::uint32_t dst1, std::uint32_t out) {
    Compute* state = compute_state("SFPU binary function");
    if (state == nullptr) {
        return;
    }
    ready(*state, op == COPY ? std::uint32_t{SFPU_COPY} : SFPU_BINARY | op << 8, "SFPU binary function");
    const Tile* a = dst_for_math(*state, dst0, "SFPU binary function", true);
    const Tile* b = dst_for_math(*state, dst1, "SFPU binary function", true);
    Tile* to = dst_for_math(*state, out, "SFPU binary function", false);
    if (a == nullptr || b == nullptr || to == nullptr) {
        return;
    }
    for (int i = 0; i < 1024; ++i) {
        (&to->at[0][0])[i] = combine(op, (&a->at[0][0])[i], (&b->at[0][0])[i]);
    }
    settle(*state, out);
    ++machine.role->core->counters.sfpu_tiles;
    spend(op == DIV ? kFunctionCycles : kSimpleCycles);
}

void emu_unsupported(const char* what) {
    machine.report("unsupported", text("the emulator does not implement %s", what));
}

}  // extern "C"
