// SPDX-License-Identifier: Apache-2.0
// Arguments and place of a role, prints and asserts.
#include "machine.hpp"

using namespace emulator;

extern "C" {

EmuPlace emu_place{nullptr, 0};

void emu_at(const char* file, int line) {
    emu_place = {file, line};
    may_give_way();
}

std::uint32_t emu_arg_address(int index, int common) {
    Role& role = *machine.role;
    const std::uint32_t count = common != 0 ? role.common_count : role.arg_count;
    if (index < 0 || static_cast<std::uint32_t>(index) >= count) {
        machine.report("no-such-argument", text("%s argument %d: the kernel has %u",
                                                common != 0 ? "common runtime" : "runtime", index, count));
        index = 0;
    }
    return l1_address(*role.core,
                      (common != 0 ? role.common : role.args) + static_cast<std::uint32_t>(index) * 4);
}

std::uint32_t emu_logical_x() { return static_cast<std::uint32_t>(machine.role->core->x); }
std::uint32_t emu_logical_y() { return static_cast<std::uint32_t>(machine.role->core->y); }
std::uint8_t* emu_my_x() { return machine.role->my_x; }
std::uint8_t* emu_my_y() { return machine.role->my_y; }
std::uint8_t emu_noc_index() { return machine.role->kind == RoleKind::Writer ? 1 : 0; }

void emu_print(const char* line) {
    if (machine.prints.size() < 1000) {
        machine.prints.push_back(core_name(*machine.role->core) + " " + name_of(machine.role->kind) + ": " +
                                 line);
    }
}

void emu_assert_failed(const char* condition) {
    machine.report("assert", text("ASSERT(%s) does not hold", condition));
}

}  // extern "C"
