#include <algorithm>

#include "linear.hpp"

namespace kvferry::engine {

namespace {
constexpr std::int64_t kTile = 16;
}

std::int64_t packed_size(std::int64_t out, std::int64_t in) {
  return (out + kTile - 1) / kTile * ((in + 1) / 2) * kTile * 2;
}

void pack(const std::uint16_t* weight, std::int64_t out, std::int64_t in, std::uint16_t* panels) {
  const std::int64_t pairs = (in + 1) / 2;
  std::fill_n(panels, packed_size(out, in), std::uint16_t{0});
  for (std::int64_t row = 0; row < out; ++row) {
    std::uint16_t* column = panels + (row / kTile * pairs * kTile + row % kTile) * 2;
    for (std::int64_t k = 0; k < in; ++k) column[k / 2 * kTile * 2 + k % 2] = weight[row * in + k];
  }
}

}  // namespace kvferry::engine
