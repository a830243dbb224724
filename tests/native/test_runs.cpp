#include <algorithm>
#include <cstdint>

#include "harness.hpp"
#include "runs.hpp"
#include "stream.hpp"

using namespace kvferry;

namespace {

constexpr int64_t kMost = INT64_MAX;

std::vector<Run> checked(const std::vector<Run>& runs, int64_t local_bytes, int64_t remote_bytes) {
  std::vector<int64_t> local, remote, length;
  for (const Run& run : runs) {
    local.push_back(run.local);
    remote.push_back(run.remote);
    length.push_back(run.length);
  }
  return checked_and_merged(local.data(), remote.data(), length.data(), runs.size(), local_bytes, remote_bytes);
}

}  // namespace

KVFERRY_TEST(runs_that_touch_on_both_sides_become_one) {
  const auto merged = checked({{0, 10, 5}, {5, 15, 5}, {10, 20, 0}, {10, 21, 1}, {11, 22, 2}, {20, 0, 1}}, 100, 100);
  CHECK(merged.size() == 3);
  CHECK(merged[0].length == 10 && merged[1].length == 3 && merged[2].length == 1);
  CHECK(total_bytes(merged) == 14);
  CHECK(checked({}, 0, 0).empty());
}

KVFERRY_TEST(runs_that_leave_a_region_are_refused_without_overflowing) {
  for (const Run& bad :
       {Run{-1, 0, 1}, Run{0, -1, 1}, Run{0, 0, -1}, Run{100, 0, 1}, Run{0, 51, 0}, Run{0, 50, 1}, Run{kMost, 0, 2},
        Run{0, kMost, kMost}, Run{2, 2, kMost}, Run{INT64_MIN, 0, 1}, Run{0, 0, INT64_MIN}})
    CHECK_THROWS(checked({{0, 0, 1}, bad}, 100, 50), OutOfBounds);
}

KVFERRY_TEST(streaming_copies_what_memcpy_would) {
  std::vector<char> source(4096 + 256), destination(source.size()), expected(source.size());
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<char>(i * 7);
  for (size_t to = 0; to < 70; to += 3) {
    for (size_t from = 0; from < 70; from += 9) {
      for (size_t bytes : {0, 1, 63, 64, 65, 127, 1000, 4096}) {
        std::fill(destination.begin(), destination.end(), '-');
        expected = destination;
        std::copy(source.begin() + from, source.begin() + from + bytes, expected.begin() + to);
        copy_streaming(destination.data() + to, source.data() + from, bytes);
        end_streaming();
        CHECK(destination == expected);
      }
    }
  }
}
