// SPDX-License-Identifier: Apache-2.0
#include "order.hpp"

#include <algorithm>

#include "machine.hpp"

namespace emulator {
namespace {

constexpr std::uint64_t kGranule = 16;   // bytes: the least alignment of a NoC transfer
constexpr std::uint64_t kBucket = 2048;  // bytes

std::uint64_t epoch(std::uint32_t role, std::uint32_t clock) { return std::uint64_t{role} << 32 | clock; }
std::uint32_t role_of(std::uint64_t epoch) { return static_cast<std::uint32_t>(epoch >> 32); }
std::uint32_t clock_of(std::uint64_t epoch) { return static_cast<std::uint32_t>(epoch); }

bool knows(std::uint32_t role, const Clock& known, std::uint32_t other, std::uint32_t clock) {
    return other == role || clock <= known[other];
}

// Memory of the system is zero, and takes no room before it is used.
template <typename T, typename Array>
void make(Array& array, std::uint64_t bytes) {
    if (array == nullptr) {
        array.reset(static_cast<T*>(std::calloc(bytes / kGranule + 1, sizeof(T))));
    }
}

void learn(Role& role, const Stamp& stamp) {
    if (stamp.role == role.id || (*role.known)[stamp.role] >= stamp.clock) {
        return;  // so all that came with it is known as well
    }
    if (role.known.use_count() > 1) {
        role.known = std::make_shared<Clock>(*role.known);
    }
    std::uint32_t* known = role.known->data();
    const std::uint32_t* more = stamp.known->data();
    for (std::size_t i = 0; i < role.known->size(); ++i) {
        known[i] = std::max(known[i], more[i]);
    }
    known[stamp.role] = stamp.clock;
}

// Of the granules that bytes [at, at + size) touch, whether all hold what the first does, and the largest.
bool all_same(const std::uint64_t* values, std::uint64_t at, std::uint32_t size) {
    const std::uint64_t first = at / kGranule, end = (at + size + kGranule - 1) / kGranule;
    std::uint64_t differ = 0;
    for (std::uint64_t i = first; i < end; ++i) {
        differ |= values[i] ^ values[first];
    }
    return differ == 0;
}
std::uint32_t largest(const std::uint32_t* values, std::uint64_t at, std::uint32_t size) {
    std::uint32_t most = 0;
    for (std::uint64_t i = at / kGranule; i < (at + size + kGranule - 1) / kGranule; ++i) {
        most = std::max(most, values[i]);
    }
    return most;
}

}  // namespace

Stamp stamp_of(Role& role) { return {role.known, role.id, role.clock++}; }

void Sync::pass_on(std::size_t steps) {
    for (std::size_t i = 0; i < steps; ++i) {
        const Step& step = steps_[i];
        reached_ = step.value;
        auto known = std::find_if(passed_.begin(), passed_.end(),
                                  [&](const Stamp& stamp) { return stamp.role == step.stamp.role; });
        if (known == passed_.end()) {
            passed_.push_back(step.stamp);
        } else {
            *known = step.stamp;
        }
    }
    steps_.erase(steps_.begin(), steps_.begin() + static_cast<std::ptrdiff_t>(steps));
}

void Sync::rise(std::uint64_t before, std::uint64_t after, const Stamp& stamp) {
    if (!machine.exact) {
        return;
    }
    if (after < before) {  // it fell: whoever waits sees a new number
        pass_on(steps_.size());
        reached_ = -1;
    } else if (steps_.empty()) {
        reached_ = static_cast<std::int64_t>(before);
    }
    steps_.push_back({static_cast<std::int64_t>(after), stamp});
}

void Sync::set(std::uint64_t value, const Stamp& stamp) {
    if (!machine.exact) {
        return;
    }
    steps_.clear();
    passed_.clear();
    reached_ = -1;
    steps_.push_back({static_cast<std::int64_t>(value), stamp});
}

void Sync::wait(Role& role, std::uint64_t value) {
    if (!machine.exact) {
        return;
    }
    const auto wanted = static_cast<std::int64_t>(value);
    std::size_t steps = 0;
    for (std::int64_t reached = reached_; reached < wanted && steps < steps_.size(); ++steps) {
        reached = steps_[steps].value;
    }
    pass_on(steps);
    for (const Stamp& stamp : passed_) {
        learn(role, stamp);
    }
}

std::string Conflict::what() const {
    const Role& other = *machine.roles[static_cast<std::size_t>(role)];
    return text("the %s of %s has %s, and nothing orders the two", name_of(other.kind),
                core_name(*other.core).c_str(), wrote ? "written" : "read");
}

Conflict History::before_read(const Role& role, std::uint64_t at, std::uint32_t size) const {
    return before_read(role.id, *role.known, at, size);
}

#if defined(EMULATOR_SANITIZED)
// Stores are not seen: the sanitizer has them.
Conflict History::before_read(std::uint32_t, const Clock&, std::uint64_t, std::uint32_t) const { return {}; }
Conflict History::before_write(const Role&, std::uint64_t, std::uint32_t) const { return {}; }
void History::read(const Role&, std::uint64_t, std::uint32_t) {}
void History::written(const Role&, std::uint64_t, std::uint32_t, std::uint32_t) {}
#else

Conflict History::before_read(std::uint32_t role, const Clock& known, std::uint64_t at,
                              std::uint32_t size) const {
    if (!machine.exact || writes_ == nullptr || at + size > bytes) {
        return {};
    }
    std::uint64_t last = writes_[at / kGranule];
    if ((last == 0 || knows(role, known, role_of(last), clock_of(last))) &&
        all_same(writes_.get(), at, size)) {
        return {};
    }
    last = 0;
    for (std::uint64_t i = at / kGranule; i * kGranule < at + size; ++i) {
        if (writes_[i] != last) {
            last = writes_[i];
            if (last != 0 && !knows(role, known, role_of(last), clock_of(last))) {
                return {static_cast<int>(role_of(last)), true};
            }
        }
    }
    return {};
}

Conflict History::before_write(const Role& role, std::uint64_t at, std::uint32_t size) const {
    const Conflict write = before_read(role, at, size);
    if (!machine.exact || write.role >= 0 || at + size > bytes) {
        return write;
    }
    for (std::size_t kind = 0; kind < reads_.size(); ++kind) {
        const std::int32_t other = local[kind];
        if (other < 0 || static_cast<std::uint32_t>(other) == role.id || reads_[kind] == nullptr) {
            continue;
        }
        if (largest(reads_[kind].get(), at, size) > (*role.known)[static_cast<std::uint32_t>(other)]) {
            return {other, false};
        }
    }
    for (std::uint64_t bucket = at / kBucket; bucket < far_.size() && bucket * kBucket < at + size;
         ++bucket) {
        for (const Read& read : far_[bucket]) {
            if (read.begin < at + size && at < read.end &&
                !knows(role.id, *role.known, read.role, read.clock)) {
                return {static_cast<int>(read.role), false};
            }
        }
    }
    return {};
}

void History::read(const Role& role, std::uint64_t at, std::uint32_t size) {
    if (!machine.exact || at + size > bytes) {
        return;
    }
    if (role.core == core) {
        auto& reads = reads_[static_cast<std::size_t>(role.kind)];
        make<std::uint32_t>(reads, bytes);
        const std::uint64_t first = at / kGranule, end = (at + size + kGranule - 1) / kGranule;
        std::fill(&reads[first], &reads[end], role.clock);
        return;
    }
    if (far_.empty()) {
        far_.resize(bytes / kBucket + 1);
    }
    for (std::uint64_t bucket = at / kBucket; bucket * kBucket < at + size; ++bucket) {
        const Read now{std::max(at, bucket * kBucket), std::min(at + size, (bucket + 1) * kBucket), role.id,
                       role.clock};
        std::vector<Read>& reads = far_[bucket];
        if (!reads.empty() && reads.back().role == now.role && reads.back().begin == now.begin &&
            reads.back().end == now.end) {
            reads.back() = now;
        } else {
            reads.push_back(now);
        }
    }
}

void History::written(const Role& role, std::uint64_t at, std::uint32_t size, std::uint32_t clock) {
    if (!machine.exact || at + size > bytes) {
        return;
    }
    make<std::uint64_t>(writes_, bytes);
    const std::uint64_t first = at / kGranule, end = (at + size + kGranule - 1) / kGranule;
    std::fill(&writes_[first], &writes_[end], epoch(role.id, clock));
    for (std::uint64_t bucket = at / kBucket; bucket < far_.size() && bucket * kBucket < at + size;
         ++bucket) {
        for (Read& read : far_[bucket]) {  // the part that was written is done with
            if (at <= read.begin) {
                read.begin = std::max(read.begin, std::min(read.end, at + size));
            } else if (at + size >= read.end) {
                read.end = std::min(read.end, at);
            }
        }
        std::erase_if(far_[bucket], [](const Read& read) { return read.begin >= read.end; });
    }
}

#endif

}  // namespace emulator
