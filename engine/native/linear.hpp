// Linear layers over packed bfloat16 weights.
//
// A weight [out, in] is packed once into panels of 16 outputs: [out / 16][in / 2][16][2], filled up with zeros. Each
// panel is read from front to back, and pairs of inputs are what the bfloat16 instructions of AVX-512 take.
#pragma once

#include <cstdint>

#include "isa.hpp"

namespace kvferry::engine {

struct Linear {
  const std::uint16_t* rows;    // [num_rows, in], bfloat16
  const std::uint16_t* panels;  // packed
  const std::uint16_t* bias;    // [out], or null
  std::uint16_t* output;        // [num_rows, out]
  std::int64_t num_rows, in, out;
};

// Elements of a packed weight.
std::int64_t packed_size(std::int64_t out, std::int64_t in);

// `weight` [out, in] to `panels`.
void pack(const std::uint16_t* weight, std::int64_t out, std::int64_t in, std::uint16_t* panels);

KVFERRY_DECLARE(void linear(const Linear& layer))

}  // namespace kvferry::engine
