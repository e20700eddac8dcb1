// SPDX-License-Identifier: Apache-2.0
// Which accesses of memory are ordered, whatever the schedule: a happens-before check with vector clocks.
//
// A role's clock counts what it let others know: pushes, pops, and semaphore messages. `known` holds, of each
// other role, the last clock that has come here. An access is ordered after another role's if that role's
// clock at its access is known. Else only luck orders the two, and the access is reported.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

struct Role;
struct Core;

using Clock = std::vector<std::uint32_t>;  // by role

// What a role knew when it let others know.
struct Stamp {
    std::shared_ptr<const Clock> known;
    std::uint32_t role = 0, clock = 0;
};
Stamp stamp_of(Role& role);  // and the role's clock goes on

// What one rising number passes on: a semaphore, or the pages of a circular buffer that were pushed or
// popped. Who waits for a value learns what the steps up to this value passed on, and nothing of the steps
// after it.
class Sync {
  public:
    void rise(std::uint64_t before, std::uint64_t after, const Stamp& stamp);
    void set(std::uint64_t value, const Stamp& stamp);  // forgets what was
    void wait(Role& role, std::uint64_t value);         // the role has seen this value, or more

  private:
    struct Step {
        std::int64_t value;
        Stamp stamp;
    };
    void pass_on(std::size_t steps);
    std::vector<Step> steps_;    // above reached_
    std::vector<Stamp> passed_;  // up to reached_: of each role the last one
    std::int64_t reached_ = 0;
};

// Another role's access that is not ordered before the one at hand; none if `role` is negative.
struct Conflict {
    int role = -1;
    bool wrote = false;
    std::string what() const;
};

// The last accesses of one memory: the L1 of a core, or a tensor in DRAM.
class History {
  public:
    Conflict before_read(const Role& role, std::uint64_t at, std::uint32_t size) const;
    Conflict before_read(std::uint32_t role, const Clock& known, std::uint64_t at, std::uint32_t size) const;
    Conflict before_write(const Role& role, std::uint64_t at, std::uint32_t size) const;
    void read(const Role& role, std::uint64_t at, std::uint32_t size);
    void written(const Role& role, std::uint64_t at, std::uint32_t size, std::uint32_t clock);

    std::uint64_t bytes = 0;
    const Core* core = nullptr;                     // whose L1 it is
    std::array<std::int32_t, 3> local{-1, -1, -1};  // its roles, by kind

  private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    template <typename T>
    using Array = std::unique_ptr<T[], Free>;
    struct Read {
        std::uint64_t begin, end;
        std::uint32_t role, clock;
    };
    Array<std::uint64_t> writes_;                // by 16 bytes: role and clock; 0: none
    std::array<Array<std::uint32_t>, 3> reads_;  // by 16 bytes: clock of the core's own role of each kind
    std::vector<std::vector<Read>> far_;         // by 2 KiB: reads by other cores since the last write
};

}  // namespace emulator
