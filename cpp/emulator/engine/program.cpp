// SPDX-License-Identifier: Apache-2.0
#include "program.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>

#include "compute.hpp"
#include "machine.hpp"

namespace emulator {
namespace {

[[noreturn]] void fail(const std::string& what) {
    std::cerr << "emulator: " << what << "\n";
    std::exit(2);
}

template <typename T>
T next(std::istream& in) {
    T value;
    if (!(in >> value)) {
        fail("the program description ends early or holds something else than a number");
    }
    return value;
}

std::string next_text(std::istream& in) {
    std::string value;
    if (!(in >> std::quoted(value))) {
        fail("the program description ends early");
    }
    return value;
}

Core& next_core(std::istream& in) {
    const int x = next<int>(in), y = next<int>(in);
    if (x < 0 || y < 0 || x >= machine.chip.columns || y >= machine.chip.rows) {
        fail(text("core (%d, %d) is not on the %d x %d grid", x, y, machine.chip.columns, machine.chip.rows));
    }
    return *machine.cores[static_cast<std::size_t>(y * machine.chip.columns + x)];
}

std::vector<std::uint32_t> next_numbers(std::istream& in) {
    std::vector<std::uint32_t> numbers(next<std::size_t>(in));
    for (std::uint32_t& number : numbers) {
        number = next<std::uint32_t>(in);
    }
    return numbers;
}

void read_chip(std::istream& in) {
    Chip& chip = machine.chip;
    chip.arch = next_text(in);
    chip.l1_size = next<std::uint32_t>(in);
    chip.l1_first = next<std::uint32_t>(in);
    chip.dram_banks = next<std::uint32_t>(in);
    chip.dram_alignment = next<std::uint32_t>(in);
    chip.dram_read_alignment = next<std::uint32_t>(in);
    chip.dram_bytes_per_cycle = next<double>(in);
    chip.noc_bytes_per_cycle = next<std::uint32_t>(in);
    chip.columns = next<int>(in);
    chip.rows = next<int>(in);
    chip.bank_free.assign(chip.dram_banks, 0);
    machine.core_at.fill(-1);
    for (int y = 0; y < chip.rows; ++y) {
        for (int x = 0; x < chip.columns; ++x) {
            auto core = std::make_unique<Core>();
            core->index = static_cast<int>(machine.cores.size());
            core->x = x;
            core->y = y;
            core->noc_x = static_cast<std::uint8_t>(next<int>(in));
            core->noc_y = static_cast<std::uint8_t>(next<int>(in));
            machine.core_at[core->noc_y * 64u + core->noc_x] = static_cast<std::int16_t>(core->index);
            map_l1(*core);
            core->history.bytes = chip.l1_size;
            core->history.core = core.get();
            machine.cores.push_back(std::move(core));
        }
    }
}

std::uint32_t allocate(Core& core, std::uint32_t begin, std::uint32_t size, const std::string& name) {
    const std::uint32_t end = begin + size;
    for (const Region& other : core.regions) {
        if (begin < other.end && other.begin < end) {
            Finding finding;
            finding.kind = "l1-overlap";
            finding.core = text("(%d, %d)", core.x, core.y);
            finding.message =
                name + " overlaps " + other.name + text(" in L1 from 0x%x on", std::max(begin, other.begin));
            machine.findings.add(std::move(finding));
        }
    }
    if (end > machine.chip.l1_size) {
        Finding finding;
        finding.kind = "l1-overflow";
        finding.core = text("(%d, %d)", core.x, core.y);
        finding.message =
            name + text(" ends at 0x%x, %u bytes past the end of L1", end, end - machine.chip.l1_size);
        machine.findings.add(std::move(finding));
        if (end > kL1Stride) {
            fail("a circular buffer does not fit the address range of a core");
        }
    }
    core.regions.push_back({begin, end, name});
    core.high_water = std::max(core.high_water, end);
    return end;
}

void read_buffer(std::istream& in, std::uint8_t* memory, std::uint64_t bytes) {
    DramBuffer buffer;
    buffer.name = next_text(in);
    buffer.base = next<std::uint32_t>(in);
    buffer.page_size = next<std::uint32_t>(in);
    buffer.pages = next<std::uint32_t>(in);
    const auto at = next<std::uint64_t>(in);
    const auto shadow = next<std::int64_t>(in);
    if (at + std::uint64_t{buffer.pages} * buffer.page_size > bytes) {
        fail("tensor " + buffer.name + " lies outside the shared memory");
    }
    buffer.bytes = memory + at;
    buffer.shadow = shadow < 0 ? nullptr : memory + shadow;
    buffer.history.bytes = std::uint64_t{buffer.pages} * buffer.page_size;
    machine.dram.push_back(std::move(buffer));
}

// Given addresses are taken (-1: none); the others follow each other in the order of the program, at the same
// address on all cores of a buffer.
void read_circular_buffer(std::istream& in) {
    CircularBuffer buffer;
    buffer.there = true;
    buffer.index = next<int>(in);
    const auto given = next<std::int64_t>(in);
    buffer.size = next<std::uint32_t>(in);
    buffer.page_size = next<std::uint32_t>(in);
    buffer.format = next<std::uint32_t>(in);
    if (buffer.index < 0 || buffer.index >= kCircularBuffers || buffer.page_size == 0 ||
        buffer.size % buffer.page_size != 0 || buffer.size == 0) {
        fail(text("circular buffer %d of %u bytes in pages of %u is not possible", buffer.index, buffer.size,
                  buffer.page_size));
    }
    buffer.pages = buffer.size / buffer.page_size;
    std::vector<Core*> cores;
    std::uint32_t address = machine.chip.l1_first;
    for (std::size_t left = next<std::size_t>(in); left > 0; --left) {
        cores.push_back(&next_core(in));
        for (const Region& region : cores.back()->regions) {
            address = std::max(address, (region.end + 31) / 32 * 32);
        }
    }
    buffer.address = given >= 0 ? static_cast<std::uint32_t>(given) : address;
    for (Core* core : cores) {
        if (core->buffers[static_cast<std::size_t>(buffer.index)].there) {
            fail(text("circular buffer %d is described twice for one core", buffer.index));
        }
        core->buffers[static_cast<std::size_t>(buffer.index)] = buffer;
        allocate(*core, buffer.address, buffer.size, text("circular buffer %d", buffer.index));
        if (buffer.address + buffer.size <= kL1Stride) {
            poison(core->l1 + buffer.address, buffer.size);
        }
    }
}

void read_semaphore(std::istream& in) {
    const auto id = next<std::uint32_t>(in), initial = next<std::uint32_t>(in);
    if (id >= kSemaphores) {
        fail(text("semaphore %u: a core has %u", id, kSemaphores));
    }
    for (std::size_t left = next<std::size_t>(in); left > 0; --left) {
        Core& core = next_core(in);
        const std::uint32_t at = machine.chip.semaphores + id * 16;
        core.semaphore_time.resize(std::max<std::size_t>(core.semaphore_time.size(), id + 1));
        core.regions.push_back({at, at + 16, text("semaphore %u", id)});
        std::memcpy(core.l1 + at, &initial, 4);
        set_shadow(core.shadow, at, 4, WRITTEN, 0);
    }
}

void read_kernel(std::istream& in) {
    auto kernel = std::make_unique<Kernel>();
    kernel->library = next_text(in);
    kernel->source = next_text(in);
    kernel->kind = static_cast<RoleKind>(next<int>(in));
    kernel->own_globals = next<int>(in) != 0;
    kernel->fidelity_phases = next<int>(in);
    kernel->fp32_dest = next<int>(in) != 0;
    kernel->full_sync = next<int>(in) != 0;
    for (const std::uint32_t cb : next_numbers(in)) {
        kernel->unpack_fp32.push_back(static_cast<int>(cb));
    }
    kernel->common_args = next_numbers(in);
    for (std::size_t left = next<std::size_t>(in); left > 0; --left) {
        Core& core = next_core(in);
        auto role = std::make_unique<Role>();
        role->core = &core;
        role->kernel = kernel.get();
        role->kind = kernel->kind;
        role->place = {nullptr, 0};
        role->id = static_cast<std::uint32_t>(machine.roles.size());
        machine.roles.push_back(role.get());
        core.history.local[static_cast<std::size_t>(role->kind)] = static_cast<std::int32_t>(role->id);
        for (int noc = 0; noc < 2; ++noc) {
            role->my_x[noc] = core.noc_x;
            role->my_y[noc] = core.noc_y;
        }
        for (const auto& other : core.roles) {
            if (other->kind == role->kind) {
                fail(core_name(core) + " has two kernels for the " + name_of(role->kind));
            }
        }
        // Arguments lie below the semaphores: 341 each at most, as on the device.
        const std::uint32_t block = 0x1000 + static_cast<std::uint32_t>(role->kind) * 0x1000;
        const auto place = [&](std::uint32_t at, const std::vector<std::uint32_t>& values, const char* what) {
            if (values.size() > 341) {
                fail(text("%zu %s arguments; at most 341 are possible", values.size(), what));
            }
            std::memcpy(core.l1 + at, values.data(), values.size() * 4);
            set_shadow(core.shadow, at, static_cast<std::uint32_t>(values.size() * 4), WRITTEN, 0);
            core.regions.push_back({at, at + static_cast<std::uint32_t>(values.size() * 4), what});
        };
        const std::vector<std::uint32_t> values = next_numbers(in);
        role->args = block;
        role->common = block + 0x800;
        role->arg_count = static_cast<std::uint32_t>(values.size());
        role->common_count = static_cast<std::uint32_t>(kernel->common_args.size());
        place(role->args, values, "runtime arguments");
        place(role->common, kernel->common_args, "common runtime arguments");
        if (role->kind == RoleKind::Compute) {
            role->compute = std::make_unique<Compute>();
            role->compute->sections = kernel->full_sync ? 1 : 2;
            role->compute->capacity = (kernel->full_sync ? 16 : 8) / (kernel->fp32_dest ? 2 : 1);
        }
        core.roles.push_back(std::move(role));
    }
    machine.kernels.push_back(std::move(kernel));
}

}  // namespace

void read_program(std::istream& in, std::uint8_t* memory, std::uint64_t memory_bytes) {
    machine.chip.semaphores = 0x5000;
    std::string word;
    while (in >> word) {
        if (word == "fast") {
            machine.exact = false;
        } else if (word == "seed") {
            machine.seed = next<std::uint64_t>(in);
        } else if (word == "chip") {
            read_chip(in);
        } else if (word == "tensor") {
            read_buffer(in, memory, memory_bytes);
        } else if (word == "circular_buffer") {
            read_circular_buffer(in);
        } else if (word == "semaphore") {
            read_semaphore(in);
        } else if (word == "kernel") {
            read_kernel(in);
        } else {
            fail("the program description holds the unknown word " + word);
        }
    }
}

void load_kernels(const std::string& scratch) {
    std::map<std::string, void*> shared;
    int copies = 0;
    for (auto& core : machine.cores) {
        for (auto& role : core->roles) {
            const Kernel& kernel = *role->kernel;
            void* library = nullptr;
            if (kernel.own_globals) {
                const std::string copy = scratch + text("/kernel-%d.so", copies++);
                std::ofstream(copy, std::ios::binary)
                    << std::ifstream(kernel.library, std::ios::binary).rdbuf();
                library = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
            } else {
                void*& known = shared[kernel.library];
                known = known != nullptr ? known : dlopen(kernel.library.c_str(), RTLD_NOW | RTLD_LOCAL);
                library = known;
            }
            if (library == nullptr) {
                fail(std::string("cannot load a kernel: ") + dlerror());
            }
            role->entry = reinterpret_cast<void (*)()>(dlsym(library, "emulator_kernel_main"));
            if (role->entry == nullptr) {
                fail("no kernel_main in " + kernel.source);
            }
        }
    }
}

}  // namespace emulator
