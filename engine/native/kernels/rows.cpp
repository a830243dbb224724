#include "rows.hpp"

#include <algorithm>
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

namespace {

// A row is looked at in parts, whose weights are kept: a token is sought in one part only.
constexpr std::int64_t kPart = 256;

struct Largest {
  float value;
  std::int64_t place;
};

Largest largest_of(const float* logits, std::int64_t width) {
  Largest largest{-std::numeric_limits<float>::infinity(), 0};
  for (std::int64_t begin = 0; begin < width; begin += kPart) {
    const std::int64_t end = std::min(width, begin + kPart);
    float highest = -std::numeric_limits<float>::infinity();
    // A NaN compares as nothing; the sum finds it.
#pragma omp simd reduction(max : highest)
    for (std::int64_t k = begin; k < end; ++k) highest = logits[k] > highest ? logits[k] : highest;
    if (highest > largest.value) {
      largest.value = highest;
      for (largest.place = begin; logits[largest.place] != highest;) ++largest.place;
    }
  }
  return largest;
}

// The weight exp((logit - highest) * scale) of each part, and their sum.
double weights_of(const float* logits, std::int64_t width, float highest, float scale, float* parts) {
  double total = 0.0;
  for (std::int64_t begin = 0; begin < width; begin += kPart) {
    const std::int64_t end = std::min(width, begin + kPart);
    float part = 0.0f;
#pragma omp simd reduction(+ : part)
    for (std::int64_t k = begin; k < end; ++k) part += exponential((logits[k] - highest) * scale);
    parts[begin / kPart] = part;
    total += part;
  }
  return total;
}

// The first place at which the cumulative weight exceeds `wanted`; rounding can keep it from that, then the last place
// that has any weight.
std::int64_t place_of(const float* logits, std::int64_t width, float highest, float scale, const float* parts,
                      double wanted) {
  const std::int64_t count = (width + kPart - 1) / kPart;
  double before = 0.0;
  std::int64_t part = 0, last = 0;
  for (; part < count; ++part) {
    if (parts[part] > 0.0f) last = part;
    if (before + parts[part] > wanted) break;
    before += parts[part];
  }
  if (part == count) {
    part = last;
    wanted = std::numeric_limits<double>::infinity();
  }
  std::int64_t found = part * kPart;
  for (std::int64_t k = part * kPart; k < std::min(width, (part + 1) * kPart); ++k) {
    const float weight = exponential((logits[k] - highest) * scale);
    if (weight > 0.0f) found = k;
    before += weight;
    if (before > wanted) break;
  }
  return found;
}

}  // namespace

void draw(const Draw& draw) {
  parallel(draw.rows, [&](std::int64_t row) {
    const float* logits = draw.logits + row * draw.width;
    const float* changed = draw.changed + row * draw.width;
    float* parts = room((draw.width + kPart - 1) / kPart);
    Largest largest = largest_of(logits, draw.width);
    double total = weights_of(logits, draw.width, largest.value, 1.0f, parts);
    draw.normalizers[row] = largest.value + static_cast<float>(std::log(total));
    const float temperature = draw.temperatures[row];
    if (changed != logits) largest = largest_of(changed, draw.width);
    draw.tokens[row] = largest.place;
    if (temperature <= 0.0f) return;
    const float scale = 1.0f / temperature;
    if (changed != logits || scale != 1.0f) {
      total = weights_of(changed, draw.width, largest.value, scale, parts);
    }
    draw.tokens[row] = place_of(changed, draw.width, largest.value, scale, parts, draw.numbers[row] * total);
  });
}

}  // namespace kvferry::engine::KVFERRY_ISA
