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

// x * cos + rotate_half(x) * sin of each head; cos and sin are [tokens, width].
struct Rotary {
  const std::uint16_t *x, *cosine, *sine;
  std::uint16_t* output;  // [tokens, heads, width]
  std::int64_t tokens, heads, width, token_stride, head_stride;
};

// Of each row of `logits` [rows, width]: the place of the largest, the first of equals, and log(sum(exp(.))).
struct Summary {
  const float* logits;
  std::int64_t rows, width;
  std::int64_t* largest;
  float* normalizer;
};

KVFERRY_DECLARE(void normalize(const Norm& norm); void gate(const Gate& gate); void rotate(const Rotary& rotary);
                void summarize(const Summary& summary))

}  // namespace kvferry::engine
