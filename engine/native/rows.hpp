// What is computed row by row between the products, each in one pass.
#pragma once

#include <cstdint>

#include "isa.hpp"

namespace kvferry::engine {

// output = x / rms(x) * (weight + offset), the mean square over each row of `width`; rounded to bfloat16 before the
// weight where `round_first`. `offset` is 1 where the weight is kept as its difference from 1.
struct Norm {
  const std::uint16_t *x, *weight;
  std::uint16_t* output;
  std::int64_t rows, x_stride, width;
  float epsilon, offset;
  bool round_first;
};

// output = silu(gate) * up; [rows, width], the inputs with these strides.
struct Gate {
  const std::uint16_t *gate, *up;
  std::uint16_t* output;
  std::int64_t rows, gate_stride, up_stride, width;
};

// One token for each row of `changed` [rows, width], which are `logits` after penalties, or the same: at temperature 0
// the first of the largest, else the first at which the cumulative weight exp(changed / temperature) exceeds `numbers`
// of the total. `normalizers` are log(sum(exp(logits))): NaN or infinite where the row has NaN, +infinity or nothing
// finite, and the token means nothing then.
struct Draw {
  const float *logits, *changed;
  std::int64_t rows, width;
  const float* temperatures;
  const double* numbers;
  std::int64_t* tokens;
  float* normalizers;
};

KVFERRY_DECLARE(void normalize(const Norm& norm); void gate(const Gate& gate); void draw(const Draw& draw))

}  // namespace kvferry::engine
