#include "linear.hpp"

#include <algorithm>
#include <vector>

#include "threads.hpp"
#include "tiles.hpp"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace kvferry::engine::KVFERRY_ISA {

namespace {

// Rows that are taken through a panel together: their inputs should stay in the second cache.
constexpr std::int64_t kRowBlock = 96;

#ifdef __AVX512BF16__
using Input = Bfloat16;

// The processor multiplies the pairs itself.
template <int Rows>
inline void multiply_inputs(const Bfloat16* x, std::int64_t stride, std::int64_t pairs, PairPanel panel,
                            Sums<Rows>& sums) {
  for (std::int64_t k = 0; k < pairs; ++k) {
    const auto columns = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel.values + k * kTile * 2));
    for (int r = 0; r < Rows; ++r) {
      std::int32_t pair;
      std::memcpy(&pair, x + r * stride + 2 * k, sizeof pair);
      const auto factor = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      sums.values[r][0] = _mm512_dpbf16_ps(sums.values[r][0], factor, columns);
    }
  }
}
#else
using Input = float;

template <int Rows>
inline void multiply_inputs(const float* x, std::int64_t stride, std::int64_t pairs, PairPanel panel,
                            Sums<Rows>& sums) {
  multiply<Rows>(x, stride, pairs, panel, sums);
}
#endif

inline void convert(const Bfloat16* from, std::int64_t count, float* to) { to_floats(from, count, to); }
inline void convert(const Bfloat16* from, std::int64_t count, Bfloat16* to) { std::copy_n(from, count, to); }

}  // namespace

void linear(const Linear& layer) {
  const std::int64_t pairs = (layer.in + 1) / 2, stride = 2 * pairs;
  const std::int64_t panels = (layer.out + kTile - 1) / kTile;
  static thread_local std::vector<Input> inputs;
  inputs.resize(static_cast<std::size_t>(std::min(kRowBlock, layer.num_rows) * stride));
  Input* const x = inputs.data();
  for (std::int64_t begin = 0; begin < layer.num_rows; begin += kRowBlock) {
    const std::int64_t rows = std::min(kRowBlock, layer.num_rows - begin);
    for (std::int64_t row = 0; row < rows; ++row) {
      convert(layer.rows + (begin + row) * layer.in, layer.in, x + row * stride);
      if (layer.in < stride) x[row * stride + layer.in] = 0;
    }
    // A task is some panels: enough work to be worth handing out.
    const std::int64_t share = std::max<std::int64_t>(1, 32768 / (pairs * rows));
    parallel((panels + share - 1) / share, [&](std::int64_t task) {
      for (std::int64_t panel = task * share; panel < std::min(panels, (task + 1) * share); ++panel) {
        const PairPanel weights{layer.panels + panel * pairs * kTile * 2};
        const std::int64_t columns = std::min<std::int64_t>(kTile, layer.out - panel * kTile);
        float bias[kTile] = {};
        if (layer.bias) to_floats(layer.bias + panel * kTile, columns, bias);
        by_rows(rows, [&](auto count, std::int64_t first) {
          constexpr int kCount = decltype(count)::value;
          Sums<kCount> sums;
          for (auto& row : sums.values) {
            for (int v = 0; v < kVectors; ++v) row[v] = load(bias + v * kLanes);
          }
          multiply_inputs<kCount>(x + first * stride, stride, pairs, weights, sums);
          for (int r = 0; r < kCount; ++r) {
            float values[kTile];
            for (int v = 0; v < kVectors; ++v) store(values + v * kLanes, sums.values[r][v]);
            Bfloat16* to = layer.output + (begin + first + r) * layer.out + panel * kTile;
            if (columns == kTile) {
              from_floats(values, kTile, to);
            } else {
              from_floats(values, columns, to);
            }
          }
        });
      }
    });
  }
}

}  // namespace kvferry::engine::KVFERRY_ISA
