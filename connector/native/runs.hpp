// Byte runs: (local offset, remote offset, length), checked against both regions and merged where they touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace kvferry {

struct Run {
  int64_t local;
  int64_t remote;
  int64_t length;
};

int64_t total_bytes(const std::vector<Run>& runs);

// A run leaves its region, or has a negative number in it.
struct OutOfBounds : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// `local`, `remote` and `length` have `count` elements each. Neighbours that are adjacent on both sides become one run;
// empty runs disappear. Throws OutOfBounds naming the first bad run.
std::vector<Run> checked_and_merged(const int64_t* local, const int64_t* remote, const int64_t* length, size_t count,
                                    int64_t local_bytes, int64_t remote_bytes);

}  // namespace kvferry
