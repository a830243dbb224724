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
template <int Rows, int Panels>
inline void multiply_inputs(const Bfloat16* x, std::int64_t stride, std::int64_t pairs, PairPanel panel,
                            Sums<Rows> (&sums)[Panels]) {
  for (std::int64_t k = 0; k < pairs; ++k) {
    for (int p = 0; p < Panels; ++p) {
      const auto columns = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel.values + (p * pairs + k) * kTile * 2));
      for (int r = 0; r < Rows; ++r) {
        std::int32_t pair;
        std::memcpy(&pair, x + r * stride + 2 * k, sizeof pair);
        const auto factor = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        sums[p].values[r][0] = _mm512_dpbf16_ps(sums[p].values[r][0], factor, columns);
      }
    }
  }
}
#else
using Input = float;

template <int Rows, int Panels>
inline void multiply_inputs(const float* x, std::int64_t stride, std::int64_t pairs, PairPanel panel,
                            Sums<Rows> (&sums)[Panels]) {
  multiply(x, stride, pairs, panel, sums);
}
#endif

inline void convert(const Bfloat16* from, std::int64_t count, float* to) { to_floats(from, count, to); }
inline void convert(const Bfloat16* from, std::int64_t count, Bfloat16* to) { std::copy_n(from, count, to); }

// Some rows of the block times some panels, from `panel` on.
template <int Rows, int Panels>
void multiply_some(const Linear& layer, const Input* x, std::int64_t row, std::int64_t panel) {
  const std::int64_t pairs = (layer.in + 1) / 2;
  Sums<Rows> sums[Panels];
  for (int p = 0; p < Panels; ++p) {
    float bias[kTile] = {};
    const std::int64_t column = (panel + p) * kTile;
    if (layer.bias) to_floats(layer.bias + column, std::min<std::int64_t>(kTile, layer.out - column), bias);
    for (auto& values : sums[p].values) {
      for (int v = 0; v < kVectors; ++v) values[v] = load(bias + v * kLanes);
    }
  }
  multiply_inputs(x, 2 * pairs, pairs, PairPanel{layer.panels + panel * pairs * kTile * 2}, sums);
  for (int p = 0; p < Panels; ++p) {
    const std::int64_t column = (panel + p) * kTile, columns = std::min<std::int64_t>(kTile, layer.out - column);
    for (int r = 0; r < Rows; ++r) {
      float values[kTile];
      for (int v = 0; v < kVectors; ++v) store(values + v * kLanes, sums[p].values[r][v]);
      Bfloat16* to = layer.output + (row + r) * layer.out + column;
      if (columns == kTile) {
        from_floats(values, kTile, to);
      } else {
        from_floats(values, columns, to);
      }
    }
  }
}

// Rows from `begin` on, whose inputs are `x`, times the panels from `first` to `last`.
void multiply_block(const Linear& layer, const Input* x, std::int64_t begin, std::int64_t rows, std::int64_t first,
                    std::int64_t last) {
  const std::int64_t stride = (layer.in + 1) / 2 * 2;
  for (std::int64_t panel = first; panel < last;) {
    std::int64_t taken = 1;
    by_rows(rows, [&](auto count, std::int64_t row) {
      constexpr int kCount = decltype(count)::value;
      constexpr int kMany = kPanels<kCount>;
      if (kCount == rows && panel + kMany <= last) {
        multiply_some<kCount, kMany>(layer, x + row * stride, begin + row, panel);
        taken = kMany;
      } else {
        multiply_some<kCount, 1>(layer, x + row * stride, begin + row, panel);
      }
    });
    panel += taken;
  }
}

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
    const std::int64_t share = std::max<std::int64_t>(4, 32768 / (pairs * rows) / 4 * 4);
    parallel((panels + share - 1) / share, [&](std::int64_t task) {
      multiply_block(layer, x, begin, rows, task * share, std::min(panels, (task + 1) * share));
    });
  }
}

}  // namespace kvferry::engine::KVFERRY_ISA
