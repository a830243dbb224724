#include "runs.hpp"

#include <string>

namespace kvferry {

namespace {

void check(const char* side, size_t index, int64_t offset, int64_t length, int64_t region_bytes) {
  // In this order nothing can overflow.
  if (offset >= 0 && length >= 0 && length <= region_bytes && offset <= region_bytes - length) return;
  throw OutOfBounds("run " + std::to_string(index) + " of the batch leaves the " + side + " region: offset " +
                    std::to_string(offset) + ", length " + std::to_string(length) + ", region " +
                    std::to_string(region_bytes) + " bytes; nothing was posted");
}

}  // namespace

int64_t total_bytes(const std::vector<Run>& runs) {
  int64_t total = 0;
  for (const Run& run : runs) total += run.length;
  return total;
}

std::vector<Run> checked_and_merged(const int64_t* local, const int64_t* remote, const int64_t* length, size_t count,
                                    int64_t local_bytes, int64_t remote_bytes) {
  std::vector<Run> runs;
  for (size_t i = 0; i < count; ++i) {
    check("local", i, local[i], length[i], local_bytes);
    check("remote", i, remote[i], length[i], remote_bytes);
    if (length[i] == 0) continue;
    if (!runs.empty()) {
      Run& last = runs.back();
      if (last.local + last.length == local[i] && last.remote + last.length == remote[i]) {
        last.length += length[i];
        continue;
      }
    }
    runs.push_back({local[i], remote[i], length[i]});
  }
  return runs;
}

}  // namespace kvferry
