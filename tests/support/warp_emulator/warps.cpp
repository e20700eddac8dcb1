// SPDX-License-Identifier: Apache-2.0
// The scheduler of warps.h: compiled once, and linked to each kernel.
#include "warps.h"

Index threadIdx, blockIdx, gridDim, blockDim;

namespace emulator {

std::vector<Fiber> fibers;
std::vector<Memory> memories;
std::vector<Meeting> of_warp, of_warpgroup, of_block, of_cluster;
std::vector<std::array<Named, 16>> of_names;
std::vector<Flight> flights;
int current, threads, cluster, together, shared_bytes;
unsigned first_block;
bool late, failed;
uint64_t events;
std::function<void()> kernel;
std::string trace;

[[noreturn]] void fail(const char* what) { throw std::runtime_error(what); }

namespace {

jmp_buf scheduler;
int ended;  // fibers
int deep;   // releases whose readers run
bool told;

}  // namespace

void pause() {
    const int me = current;
    if (!_setjmp(fibers[me].place)) _longjmp(scheduler, 1);
    become(me);
}

void tell() {
    ++events;
    told = true;
    pause();
}

bool over(Meeting& meeting, unsigned generation) {
    if (meeting.generation != generation) return true;
    if (meeting.asked == meeting.arrived && meeting.ended == ended) return false;
    meeting.asked = meeting.arrived;
    meeting.ended = ended;
    int members = 0;
    for (int i = 0; i < meeting.count; ++i) members += !fibers[meeting.first + i].done;
    if (meeting.arrived < members) return false;
    meeting.arrived = 0;
    meeting.asked = -1;
    ++meeting.generation;
    ++events;
    return true;
}

namespace {

void enter(int fiber) {
    become(fiber);
    try {
        kernel();
        for (const auto& group : fibers[current].groups)
            if (!group.empty()) fail("it ends before its copies");
        if (!fibers[current].products.empty()) fail("it ends before its products");
    } catch (const std::runtime_error& error) {
        std::fprintf(stderr, "thread %u of block %u: %s\n", threadIdx.x, blockIdx.x, error.what());
        failed = true;
    }
    fibers[current].done = true;
    ++ended;
    ++events;
    _longjmp(scheduler, 1);
}

// Runs a fiber until it pauses or ends.
void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (std::exchange(fiber.begun, true)) _longjmp(fiber.place, 1);
    setcontext(&fiber.context);
}

void run_far(int warp);

template <class Round>
void until_all_wait(const Round& round) {
    for (uint64_t before = events - 1; before != events && !failed;) {
        before = events;
        round();
    }
}

// Runs a fiber until it pauses; whether it had not ended. Behind a release the other blocks run first, as far
// as they can: what they read then has to be there.
bool step(int fiber) {
    if (fibers[fiber].done) return false;
    become(fiber);
    resume(fibers[fiber]);
    if (std::exchange(told, false) && deep < together) {
        ++deep;
        const int of_block = threads / 32, own = fiber / threads;
        until_all_wait([&] {
            for (int warp = 0; warp < of_block * together; ++warp)
                if (warp / of_block != own) run_far(warp);
        });
        --deep;
    }
    return true;
}

// Runs a warp until it waits for others.
void run_far(int warp) {
    until_all_wait([&] {
        for (int i = 0; i < 32 && !failed; ++i) step(32 * warp + i);
    });
}

// Threads take turns, up and down: none is always ahead of another.
void run_together() {
    const int all = threads * together;
    memories.resize(together);
    for (Memory& memory : memories) std::memset(memory.bytes, 0xff, sizeof memory.bytes);
    const auto meetings = [all](std::vector<Meeting>& of, int each) {
        of.assign(all / each, {});
        for (int i = 0; i < all / each; ++i) of[i] = {each * i, each};
    };
    meetings(of_warp, 32);
    of_warpgroup.clear();  // warps past a block's last whole warpgroup have none
    for (int block = 0; block < together; ++block)
        for (int i = 0; i < threads / 128; ++i) of_warpgroup.push_back({threads * block + 128 * i, 128});
    meetings(of_block, threads);
    meetings(of_cluster, threads * cluster);
    of_names.assign(together, {});
    flights.clear();
    fibers.resize(all);
    for (int i = 0; i < all; ++i) {
        Fiber& fiber = fibers[i];
        fiber.done = fiber.begun = false;
        fiber.turn = 0;
        fiber.open.clear();
        fiber.groups.clear();
        fiber.open_products.clear();
        fiber.products.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, reinterpret_cast<void (*)()>(enter), 1, i);
    }
    uint64_t seen[2] = {events, events};  // after the last two rounds
    for (bool busy = true, up = !late; busy && !failed; up = !up) {
        busy = false;
        for (int j = 0; j < all && !failed; ++j) busy |= step(up ? j : all - 1 - j);
        if (busy && seen[0] == events) {
            std::fprintf(stderr, "all threads of block %u wait for one another\n", blockIdx.x);
            failed = true;
        }
        seen[0] = seen[1];
        seen[1] = events;
    }
    for (const Memory& memory : memories)
        if (std::any_of(memory.bytes + shared_bytes, std::end(memory.bytes),
                        [](int byte) { return byte != 0xff; })) {
            std::fprintf(stderr, "block %u, or one that runs with it, wrote past its shared memory\n",
                         blockIdx.x);
            failed = true;
        }
}

}  // namespace

bool run_grid(Index grid, int block, int blocks_of_cluster, int at_a_time, int bytes, bool copies_are_late,
              std::function<void()> body) {
    kernel = std::move(body);
    late = copies_are_late;
    shared_bytes = bytes;
    threads = block;
    cluster = blocks_of_cluster;
    together = at_a_time;
    gridDim = grid;
    blockDim.x = block;
    failed = false;
    trace.clear();
    for (unsigned z = 0; z < grid.z; ++z)
        for (first_block = 0; first_block < grid.x * grid.y && !failed; first_block += together) {
            blockIdx.z = z;
            run_together();
        }
    return !failed;
}

}  // namespace emulator
