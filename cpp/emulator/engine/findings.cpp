// SPDX-License-Identifier: Apache-2.0
#include "findings.hpp"

#include <cstddef>
#include <utility>

namespace emulator {

void Findings::add(Finding finding) {
    for (Finding& known : findings_) {
        const bool same_place = known.file == finding.file && known.line == finding.line &&
                                known.library == finding.library && known.offset == finding.offset;
        if (same_place && known.kind == finding.kind && known.role == finding.role &&
            known.kernel == finding.kernel) {
            ++known.count;
            return;
        }
    }
    constexpr std::size_t kMost = 200;
    if (findings_.size() < kMost) {
        findings_.push_back(std::move(finding));
    }
}

}  // namespace emulator
