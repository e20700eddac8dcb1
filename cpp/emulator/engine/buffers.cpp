// SPDX-License-Identifier: Apache-2.0
// Circular buffers. The roles of a core share the page counts; each role has its own pointers. A pointer may
// wrap only when it is exactly at the end.
#include <algorithm>

#include "fiber.hpp"
#include "machine.hpp"

using namespace emulator;

namespace {

constexpr std::uint64_t kCallCycles = 10;

CircularBuffer* buffer_of(std::uint32_t cb, const char* call) {
    Role& role = *machine.role;
    if (cb >= kCircularBuffers || !role.core->buffers[cb].there) {
        machine.report("no-such-buffer", text("%s: circular buffer %u does not exist on %s", call, cb,
                                              core_name(*role.core).c_str()));
        return nullptr;
    }
    return &role.core->buffers[cb];
}

// One role may push and one may pop: the pointers of other roles would not follow.
void claim(int& owner, const char* verb, std::uint32_t cb) {
    const int self = static_cast<int>(machine.role->kind);
    if (owner >= 0 && owner != self) {
        machine.report(
            "two-roles",
            text("circular buffer %u: the %s %s after the %s did; each role has pointers of its own", cb,
                 name_of(machine.role->kind), verb, name_of(RoleKind(owner))));
    }
    owner = self;
}

// The role has seen that pages can be reserved: as many were popped as that takes.
void learn_of_room(CircularBuffer& buffer, std::uint32_t pages) {
    if (buffer.pushed + pages > buffer.pages) {
        buffer.emptied.wait(*machine.role, buffer.pushed + pages - buffer.pages);
    }
}

}  // namespace

extern "C" {

void emu_cb_reserve_back(std::uint32_t cb, std::uint32_t pages) {
    CircularBuffer* buffer = buffer_of(cb, "cb_reserve_back");
    spend(kCallCycles);
    if (buffer == nullptr) {
        return;
    }
    if (pages > buffer->pages) {
        machine.report("never-fits", text("cb_reserve_back of %u pages: circular buffer %u has %u", pages, cb,
                                          buffer->pages));
    }
    wait_until(Wait::Reserve, cb, pages, 0);
    observe(&buffer->popped);
    learn_of_room(*buffer, pages);
    CircularBufferView& view = machine.role->views[cb];
    view.reserved = std::max(view.reserved, pages);
}

void emu_cb_push_back(std::uint32_t cb, std::uint32_t pages) {
    CircularBuffer* buffer = buffer_of(cb, "cb_push_back");
    spend(kCallCycles);
    if (buffer == nullptr) {
        return;
    }
    Role& role = *machine.role;
    Core& core = *role.core;
    CircularBufferView& view = role.views[cb];
    claim(buffer->pusher, "pushes", cb);
    if (buffer->pushed + pages - buffer->popped > buffer->pages) {
        machine.report(
            "push-past-capacity",
            text("cb_push_back of %u pages: %llu of the %u pages of circular buffer %u are still full", pages,
                 static_cast<unsigned long long>(buffer->pushed - buffer->popped), buffer->pages, cb));
    } else if (pages > view.reserved) {
        machine.report("push-without-reserve",
                       text("cb_push_back of %u pages of circular buffer %u: %u are reserved", pages, cb,
                            view.reserved));
    }
    const std::uint32_t bytes = pages * buffer->page_size;
    if (view.write + bytes > buffer->size) {
        machine.report("wrap", text("cb_push_back of %u pages of circular buffer %u: the write pointer is at "
                                    "page %u of %u and wraps in mid-push",
                                    pages, cb, view.write / buffer->page_size, buffer->pages));
    }
    const std::uint32_t left = std::min(bytes, buffer->size - view.write);
    if ((any_shadow(core.shadow, buffer->address + view.write, left) & ARRIVING) != 0) {
        machine.report("push-before-barrier",
                       text("cb_push_back of circular buffer %u: a NoC read into these pages is still under "
                            "way (no noc_async_read_barrier)",
                            cb));
    }
    view.write = (view.write + bytes) % buffer->size;
    view.reserved -= std::min(view.reserved, pages);
    view.packed = 0;
    buffer->filled.rise(buffer->pushed, buffer->pushed + pages, stamp_of(role));
    buffer->pushed += pages;
    buffer->pushed_at = role.time;
    publish(&buffer->pushed);
    changed(core);
}

void emu_cb_wait_front(std::uint32_t cb, std::uint32_t pages) {
    CircularBuffer* buffer = buffer_of(cb, "cb_wait_front");
    spend(kCallCycles);
    if (buffer == nullptr) {
        return;
    }
    if (pages > buffer->pages) {
        machine.report("never-fits", text("cb_wait_front for %u pages: circular buffer %u has %u", pages, cb,
                                          buffer->pages));
    }
    wait_until(Wait::Front, cb, pages, 0);
    observe(&buffer->pushed);
    buffer->filled.wait(*machine.role, buffer->popped + pages);
    CircularBufferView& view = machine.role->views[cb];
    view.waited = std::max(view.waited, pages);
}

void emu_cb_pop_front(std::uint32_t cb, std::uint32_t pages) {
    CircularBuffer* buffer = buffer_of(cb, "cb_pop_front");
    spend(kCallCycles);
    if (buffer == nullptr) {
        return;
    }
    Role& role = *machine.role;
    CircularBufferView& view = role.views[cb];
    claim(buffer->popper, "pops", cb);
    if (buffer->popped + pages > buffer->pushed) {
        machine.report("pop-past-pushed",
                       text("cb_pop_front of %u pages of circular buffer %u: %llu are there", pages, cb,
                            static_cast<unsigned long long>(buffer->pushed - buffer->popped)));
    }
    if (pages > view.waited) {
        machine.report("pop-without-wait",
                       text("cb_pop_front of %u pages of circular buffer %u: %u were waited for", pages, cb,
                            view.waited));
    }
    const std::uint32_t bytes = pages * buffer->page_size;
    if (view.read + bytes > buffer->size) {
        machine.report("wrap", text("cb_pop_front of %u pages of circular buffer %u: the read pointer is at "
                                    "page %u of %u and wraps in mid-pop",
                                    pages, cb, view.read / buffer->page_size, buffer->pages));
    }
    const std::uint32_t left = std::min(bytes, buffer->size - view.read);
    if ((any_shadow(role.core->shadow, buffer->address + view.read, left) & LEAVING) != 0) {
        machine.report(
            "pop-before-flush",
            text("cb_pop_front of circular buffer %u: a NoC write from these pages has not been flushed",
                 cb));
    }
    view.read = (view.read + bytes) % buffer->size;
    view.waited -= std::min(view.waited, pages);
    const std::uint64_t popped = std::min(buffer->popped + pages, buffer->pushed);
    buffer->emptied.rise(buffer->popped, popped, stamp_of(role));
    buffer->popped = popped;
    buffer->popped_at = role.time;
    publish(&buffer->popped);
    changed(*role.core);
}

std::uint32_t emu_cb_reservable(std::uint32_t cb, std::uint32_t pages) {
    CircularBuffer* buffer = buffer_of(cb, "cb_pages_reservable_at_back");
    emu_poll();
    if (buffer == nullptr || buffer->pushed - buffer->popped + pages > buffer->pages) {
        return 0;
    }
    learn_of_room(*buffer, pages);
    return 1;
}

std::uint32_t emu_cb_available(std::uint32_t cb, std::uint32_t pages) {
    CircularBuffer* buffer = buffer_of(cb, "cb_pages_available_at_front");
    emu_poll();
    if (buffer == nullptr || buffer->pushed - buffer->popped < pages) {
        return 0;
    }
    buffer->filled.wait(*machine.role, buffer->popped + pages);
    return 1;
}

std::uint32_t emu_cb_write_ptr(std::uint32_t cb) {
    CircularBuffer* buffer = buffer_of(cb, "get_write_ptr");
    Role& role = *machine.role;
    return buffer == nullptr ? 0 : l1_address(*role.core, buffer->address + role.views[cb].write);
}

std::uint32_t emu_cb_read_ptr(std::uint32_t cb) {
    CircularBuffer* buffer = buffer_of(cb, "get_read_ptr");
    Role& role = *machine.role;
    return buffer == nullptr ? 0 : l1_address(*role.core, buffer->address + role.views[cb].read);
}

std::uint32_t emu_cb_tile_address(std::uint32_t cb, std::uint32_t tile) {
    CircularBuffer* buffer = buffer_of(cb, "get_tile_address");
    return buffer == nullptr ? 0 : emu_cb_read_ptr(cb) + tile * buffer->page_size;
}

}  // extern "C"
