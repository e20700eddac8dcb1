// SPDX-License-Identifier: Apache-2.0
// What runs next: the role or the NoC message with the least simulated time. It is a deadlock if nothing can
// run and a role still waits.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <queue>

#include "fiber.hpp"
#include "machine.hpp"

namespace emulator {
namespace {

struct Event {
    std::uint64_t time;
    std::uint64_t order;
    Role* role;
    Channel* channel;  // null: the role runs
    bool operator>(const Event& other) const {
        return time != other.time ? time > other.time : order > other.order;
    }
};

std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
std::uint64_t order = 0;
std::uint64_t idle_polls = 0;  // polls since anything else happened
std::uint64_t awaited = 0;     // events that are no polls
constexpr std::uint64_t kPollCycles = 40;
std::uint32_t patience = 0;  // with a seed: places to give way that a role passes by

void push(std::uint64_t time, Role& role, Channel* channel) {
    awaited += channel != nullptr || role.wait.kind != Wait::Poll;
    events.push({time, order++, &role, channel});
}

void enqueue(Role& role) {
    if (!role.queued && !role.done) {
        role.queued = true;
        role.time += delay();
        push(role.time, role, nullptr);
    }
}

// The next number of the seed's row (splitmix64).
std::uint64_t random_number() {
    static std::uint64_t state = machine.seed;
    std::uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

bool holds(const Role& role, std::uint64_t& since) {
    Core& core = *role.core;
    switch (role.wait.kind) {
        case Wait::Reserve: {
            const CircularBuffer& buffer = core.buffers[role.wait.a];
            since = buffer.popped_at;
            return buffer.pushed - buffer.popped + role.wait.b <= buffer.pages;
        }
        case Wait::Front: {
            const CircularBuffer& buffer = core.buffers[role.wait.a];
            since = buffer.pushed_at;
            return buffer.pushed - buffer.popped >= role.wait.b;
        }
        case Wait::Semaphore: {
            std::uint32_t value;
            __builtin_memcpy(&value, core.l1 + role.wait.a, 4);
            const std::uint32_t id = (role.wait.a - machine.chip.semaphores) / 16;
            since = id < core.semaphore_time.size() ? core.semaphore_time[id] : 0;
            return role.wait.at_least != 0 ? value >= role.wait.b : value == role.wait.b;
        }
        default:
            since = 0;
            return true;
    }
}

void body() {
    Role& role = *machine.role;
    role.entry();
    role.place = emu_place;
    finish_noc(role);
    role.done = true;
    changed(*role.core);
}

void switch_to(Role& role) {
    machine.role = &role;
    emu_place = role.place;
    ++machine.steps;
    role.fiber->enter();
    role.place = emu_place;
    machine.role = nullptr;
    if (role.stored) {
        role.stored = false;
        changed(*role.core);
    }
}

void yield() { machine.role->fiber->leave(); }

void report_deadlock() {
    machine.deadlock = true;
    std::string all;
    int left = 0;
    Role* first = nullptr;
    for (auto& core : machine.cores) {
        for (auto& role : core->roles) {
            if (role->done) {
                continue;
            }
            if (first == nullptr) {
                first = role.get();
            }
            if (++left <= 12) {
                all += "\n  " + describe_wait(*role);
            }
        }
    }
    if (left > 12) {
        all += text("\n  and %d more", left - 12);
    }
    machine.report_at("deadlock", text("no role can go on; %d wait:", left) + all, first->place, *first);
}

}  // namespace

void start(Role& role) {
    static const auto nothing = std::make_shared<Clock>(machine.roles.size());
    role.known = nothing;
    role.fiber = std::make_unique<Fiber>(body);
    enqueue(role);
}

void spend(std::uint64_t cycles) { machine.role->time += cycles; }

void arrives(Role& role, Channel& channel, std::uint64_t time) { push(time, role, &channel); }

// Half of all are none; the others are of any size, so that one role or message may fall far behind the rest.
std::uint64_t delay() {
    constexpr std::uint64_t kSizes = 13;
    if (machine.seed == 0) {
        return 0;
    }
    const std::uint64_t number = random_number();
    return number % 2 == 0 ? 0 : (number >> 8) % (std::uint64_t{2} << (number >> 1) % kSizes);
}

void may_give_way() {
    if (machine.seed == 0 || machine.role == nullptr || patience-- > 0) {
        return;
    }
    patience = static_cast<std::uint32_t>(random_number() % 64);
    Role& role = *machine.role;
    role.wait.kind = Wait::Time;
    enqueue(role);
    yield();
    role.wait.kind = Wait::None;
}

void changed(Core& core) {
    idle_polls = 0;
    for (auto& role : core.roles) {
        if (role->queued || role->done || role->wait.kind == Wait::None || role.get() == machine.role) {
            continue;
        }
        std::uint64_t since;
        if (holds(*role, since)) {
            enqueue(*role);
        }
    }
}

void wait_until(Wait::Kind kind, std::uint32_t a, std::uint32_t b, std::uint32_t at_least) {
    Role& role = *machine.role;
    role.wait = {kind, a, b, at_least};
    std::uint64_t since;
    bool blocked = false;
    while (!holds(role, since)) {
        blocked = true;
        yield();
    }
    if (blocked && since > role.time) {
        role.waited += since - role.time;
        role.time = since;
    }
    role.wait.kind = Wait::None;
}

void sleep_until(std::uint64_t time) {
    Role& role = *machine.role;
    if (time > role.time) {
        role.waited += time - role.time;
        role.time = time;
    }
    if (!events.empty() && events.top().time < role.time) {
        role.wait.kind = Wait::Time;
        enqueue(role);
        yield();
        role.wait.kind = Wait::None;
    }
}

void run_all() {
    std::uint64_t live = 0;
    for (auto& core : machine.cores) {
        live += core->roles.size();
    }
    for (;;) {
        if (events.empty()) {  // a plain store that no hook saw may have ended a wait
            for (auto& core : machine.cores) {
                changed(*core);
            }
            if (events.empty()) {
                break;
            }
        }
        const Event event = events.top();
        events.pop();
        const bool polling = event.channel == nullptr && event.role->wait.kind == Wait::Poll;
        awaited -= polling ? 0 : 1;
        if (event.channel != nullptr) {
            land_channel(*event.role, *event.channel, event.time, false);
            continue;
        }
        Role& role = *event.role;
        role.queued = false;
        if (polling && awaited == 0 && ++idle_polls > 2000 + 50 * live) {
            break;  // everyone who runs only looks
        }
        switch_to(role);
        if (role.done) {
            role.fiber.reset();
        }
    }
    for (auto& core : machine.cores) {
        for (auto& role : core->roles) {
            if (!role->done) {
                report_deadlock();
                return;
            }
        }
    }
}

std::string describe_wait(const Role& role) {
    const Core& core = *role.core;
    std::string who =
        text("%s %s (%s", core_name(core).c_str(), name_of(role.kind), role.kernel->source.c_str());
    who += role.place.line > 0 ? text(", line %d) ", role.place.line) : ") ";
    switch (role.wait.kind) {
        case Wait::Reserve: {
            const CircularBuffer& b = core.buffers[role.wait.a];
            who +=
                text("waits in cb_reserve_back for %u pages of circular buffer %u: %llu of %u are full, ",
                     role.wait.b, role.wait.a, static_cast<unsigned long long>(b.pushed - b.popped), b.pages);
            return who + (b.popper < 0 ? "nobody has popped from it"
                                       : text("the %s pops", name_of(RoleKind(b.popper))));
        }
        case Wait::Front: {
            const CircularBuffer& b = core.buffers[role.wait.a];
            who += text("waits in cb_wait_front for %u pages of circular buffer %u: %llu are there, ",
                        role.wait.b, role.wait.a, static_cast<unsigned long long>(b.pushed - b.popped));
            return who + (b.pusher < 0 ? "nobody has pushed to it"
                                       : text("the %s pushes", name_of(RoleKind(b.pusher))));
        }
        case Wait::Semaphore: {
            std::uint32_t value;
            __builtin_memcpy(&value, core.l1 + role.wait.a, 4);
            const std::uint32_t id = (role.wait.a - machine.chip.semaphores) / 16;
            return who + text("waits for semaphore %u to be %s%u: it is %u", id,
                              role.wait.at_least ? "at least " : "", role.wait.b, value);
        }
        case Wait::Poll:
            return who + "polls memory that nobody changes";
        default:
            return who + "was not run";
    }
}

}  // namespace emulator

extern "C" void emu_poll() {
    using namespace emulator;
    Role& role = *machine.role;
    role.time += kPollCycles;
    role.waited += kPollCycles;
    role.wait.kind = Wait::Poll;
    enqueue(role);
    yield();
    role.wait.kind = Wait::None;
}
