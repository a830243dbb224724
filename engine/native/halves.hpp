// Rows of bfloat16 taken as pairs: the vector of their even elements and that of their odd ones, which costs two
// operations where restoring the order would cost a shuffle. Whoever keeps to this order from end to end never needs
// the other. Rows of floats are two vectors one after the other.
#pragma once

#include "vectors.hpp"

namespace kvferry::engine::KVFERRY_ISA {

constexpr int kBoth = 2 * kLanes;

struct Both {
  Floats first, second;
};

inline Both load_both(const float* from) { return {load(from), load(from + kLanes)}; }

inline Both load_both(const Bfloat16* from) {
  Ints pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  return {reinterpret_cast<Floats>(pairs << 16),
          reinterpret_cast<Floats>(pairs & static_cast<std::int32_t>(0xffff0000))};
}

inline void store_both(Both both, float* to) {
  store(to, both.first);
  store(to + kLanes, both.second);
}

// The upper halves of floats, rounded to nearest even; a NaN stays one.
inline Ints rounded(Floats value) {
  const Ints bits = reinterpret_cast<Ints>(value);
  const Ints up = bits + 0x7fff + ((bits >> 16) & 1);
  const Ints is_nan = value != value;
  return (is_nan & (bits | 0x400000)) | (~is_nan & up);
}

inline void store_both(Both both, Bfloat16* to) {
  const Ints low = (rounded(both.first) >> 16) & 0xffff;
  const Ints pairs = low | (rounded(both.second) & static_cast<std::int32_t>(0xffff0000));
  std::memcpy(to, &pairs, sizeof pairs);
}

typedef float FourFloats __attribute__((vector_size(16)));
typedef std::int32_t FourInts __attribute__((vector_size(16)));

inline float sum(Floats value) {
  FourFloats parts[kLanes / 4];
  std::memcpy(parts, &value, sizeof value);
  for (int width = kLanes / 4; width > 1; width /= 2) {
    for (int part = 0; part < width / 2; ++part) parts[part] += parts[part + width / 2];
  }
  const FourFloats two = parts[0] + __builtin_shuffle(parts[0], FourInts{2, 3, 0, 1});
  return two[0] + two[1];
}

}  // namespace kvferry::engine::KVFERRY_ISA
