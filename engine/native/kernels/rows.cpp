#include "rows.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include "threads.hpp"
#include "vectors.hpp"

namespace kvferry::engine::KVFERRY_ISA {

namespace {

// Room for one row of floats on each thread.
float* room(std::int64_t width) {
  static thread_local std::vector<float> floats;
  if (static_cast<std::int64_t>(floats.size()) < width) floats.resize(width);
  return floats.data();
}

}  // namespace

void normalize(const Norm& norm) {
  float* row = room(norm.width);
  for (std::int64_t index = 0; index < norm.rows; ++index) {
    to_floats(norm.x + index * norm.x_stride, norm.width, row);
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (std::int64_t k = 0; k < norm.width; ++k) squares += row[k] * row[k];
    const float scale = 1.0f / std::sqrt(squares / norm.width + norm.epsilon);
    std::uint16_t* to = norm.output + index * norm.width;
    if (norm.round_first) {
      for (std::int64_t k = 0; k < norm.width; ++k) {
        to[k] = to_bfloat16(to_float(to_bfloat16(row[k] * scale)) * (to_float(norm.weight[k]) + norm.offset));
      }
    } else {
      for (std::int64_t k = 0; k < norm.width; ++k) {
        to[k] = to_bfloat16(row[k] * scale * (to_float(norm.weight[k]) + norm.offset));
      }
    }
  }
}

void gate(const Gate& gate) {
  for (std::int64_t index = 0; index < gate.rows; ++index) {
    const std::uint16_t* __restrict gates = gate.gate + index * gate.gate_stride;
    const std::uint16_t* __restrict up = gate.up + index * gate.up_stride;
    std::uint16_t* __restrict to = gate.output + index * gate.width;
    for (std::int64_t k = 0; k < gate.width; ++k) {
      const float x = to_float(gates[k]);
      const float silu = to_float(to_bfloat16(x / (1.0f + exponential(-x))));
      to[k] = to_bfloat16(silu * to_float(up[k]));
    }
  }
}

void rotate(const Rotary& rotary) {
  const std::int64_t half = rotary.width / 2;
  for (std::int64_t token = 0; token < rotary.tokens; ++token) {
    const std::uint16_t* __restrict cosine = rotary.cosine + token * rotary.width;
    const std::uint16_t* __restrict sine = rotary.sine + token * rotary.width;
    for (std::int64_t head = 0; head < rotary.heads; ++head) {
      const std::uint16_t* __restrict x = rotary.x + token * rotary.token_stride + head * rotary.head_stride;
      std::uint16_t* __restrict to = rotary.output + (token * rotary.heads + head) * rotary.width;
      for (std::int64_t k = 0; k < half; ++k) {
        const float low = to_float(x[k]), high = to_float(x[k + half]);
        to[k] = to_bfloat16(to_float(to_bfloat16(low * to_float(cosine[k]))) -
                            to_float(to_bfloat16(high * to_float(sine[k]))));
        to[k + half] = to_bfloat16(to_float(to_bfloat16(high * to_float(cosine[k + half]))) +
                                   to_float(to_bfloat16(low * to_float(sine[k + half]))));
      }
    }
  }
}

void summarize(const Summary& summary) {
  parallel(summary.rows, [&](std::int64_t index) {
    const float* logits = summary.logits + index * summary.width;
    float highest = -std::numeric_limits<float>::infinity();
    // A NaN compares as nothing; the sum finds it.
#pragma omp simd reduction(max : highest)
    for (std::int64_t k = 0; k < summary.width; ++k) highest = logits[k] > highest ? logits[k] : highest;
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (std::int64_t k = 0; k < summary.width; ++k) total += exponential(logits[k] - highest);
    std::int64_t place = 0;
    while (place < summary.width - 1 && logits[place] != highest) ++place;
    summary.largest[index] = place;
    summary.normalizer[index] = highest + std::log(total);
  });
}

}  // namespace kvferry::engine::KVFERRY_ISA
