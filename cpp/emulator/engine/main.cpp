// SPDX-License-Identifier: Apache-2.0
// emulator PROGRAM MEMORY RESULT SCRATCH SECONDS: runs one program to its end, or for so many seconds.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "machine.hpp"
#include "program.hpp"

namespace {

// A kernel left its memory: report which kernel, then die of the signal.
void on_signal(int number) {
    const emulator::Role* role = emulator::machine.role;
    char line[512];
    const char* what = number == SIGALRM ? "ran out of time" : "touched memory that is not L1";
    if (role != nullptr) {
        std::snprintf(line, sizeof line, "emulator: core (%d, %d) %s (%s) %s, after line %d\n", role->core->x,
                      role->core->y, emulator::name_of(role->kind), role->kernel->source.c_str(), what,
                      emu_place.line);
    } else {
        std::snprintf(line, sizeof line, "emulator: the engine itself %s\n", what);
    }
    if (write(2, line, std::strlen(line)) < 0) {
        _exit(3);
    }
    _exit(3);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 6) {
        std::fprintf(stderr, "usage: emulator PROGRAM MEMORY RESULT SCRATCH SECONDS\n");
        return 2;
    }
    const int memory = open(argv[2], O_RDWR | O_CLOEXEC);
    struct stat about{};
    if (memory < 0 || fstat(memory, &about) != 0) {
        std::perror("emulator: cannot open the shared memory");
        return 2;
    }
    const auto bytes = static_cast<std::size_t>(about.st_size);
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (mapped == MAP_FAILED) {
        std::perror("emulator: cannot map the shared memory");
        return 2;
    }
#if !defined(EMULATOR_SANITIZED)
    // The handler needs a stack of its own: the one at hand may be a fiber's that ran over.
    static char spare[64 * 1024];
    stack_t alternative{};
    alternative.ss_sp = spare;
    alternative.ss_size = sizeof spare;
    sigaltstack(&alternative, nullptr);
    struct sigaction action{};
    action.sa_handler = on_signal;
    action.sa_flags = SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    sigaction(SIGFPE, &action, nullptr);
    sigaction(SIGALRM, &action, nullptr);
#else
    std::signal(SIGALRM, on_signal);
#endif
    std::ifstream program(argv[1]);
    if (!program) {
        std::perror("emulator: cannot read the program");
        return 2;
    }
    emulator::read_program(program, static_cast<std::uint8_t*>(mapped), bytes);
    emulator::load_kernels(argv[4]);
    alarm(static_cast<unsigned>(std::atoi(argv[5])));
    for (auto& core : emulator::machine.cores) {
        for (auto& role : core->roles) {
            emulator::start(*role);
        }
    }
    emulator::run_all();
    emulator::check_end();
    std::ofstream result(argv[3]);
    emulator::write_result(result);
    result.close();
    return result.good() ? 0 : 2;
}
