// Vectors of the width that a variant was compiled for, and what kernels do with them. Included by files in kernels/.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvferry::engine::KVFERRY_ISA {

// Tiles are 16 floats wide in every variant, so that packed weights are the same for all.
constexpr int kTile = 16;
#if defined(KVFERRY_ISA_avx512)
constexpr int kLanes = 16;
#elif defined(KVFERRY_ISA_avx2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kVectors = kTile / kLanes;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes)));

// bfloat16 is the upper half of a float.
using Bfloat16 = std::uint16_t;

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline Floats broadcast(float value) { return value - Floats{}; }

inline float to_float(float value) { return value; }

inline float to_float(Bfloat16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Rounds to nearest, ties to even; a NaN stays one.
inline Bfloat16 to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<Bfloat16>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

inline void from_float(float value, float& to) { to = value; }
inline void from_float(float value, Bfloat16& to) { to = to_bfloat16(value); }

template <typename T>
inline void to_floats(const T* __restrict from, std::int64_t count, float* __restrict to) {
  for (std::int64_t index = 0; index < count; ++index) to[index] = to_float(from[index]);
}

template <typename T>
inline void from_floats(const float* __restrict from, std::int64_t count, T* __restrict to) {
  for (std::int64_t index = 0; index < count; ++index) from_float(from[index], to[index]);
}

// e to the x, within 2 units in the last place; 0 below -87, and x is taken as 88 above that. A NaN stays one.
inline float exponential(float x) {
  const float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  // Adding 1.5 * 2^23 rounds to a whole number, which stands in the lowest bits then.
  const float shifted = bounded * 1.44269504088896341f + 12582912.0f;
  const float whole = shifted - 12582912.0f;
  const float rest = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float power = 1.9875691500e-4f;
  power = power * rest + 1.3981999507e-3f;
  power = power * rest + 8.3334519073e-3f;
  power = power * rest + 4.1665795894e-2f;
  power = power * rest + 1.6666665459e-1f;
  power = power * rest + 5.0000001201e-1f;
  power = power * rest * rest + rest + 1.0f;
  std::int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4b400000 + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  const float result = x < -87.0f ? 0.0f : power * scale;
  return x == x ? result : x;
}

}  // namespace kvferry::engine::KVFERRY_ISA
