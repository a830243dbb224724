// Products of a few rows with a panel 16 columns wide, kept in registers: what linear layers and attention consist of.
#pragma once

#include <type_traits>

#include "vectors.hpp"

namespace kvferry::engine::KVFERRY_ISA {

// Rows whose sums fit into the registers beside the panel.
#if defined(KVFERRY_ISA_avx512)
constexpr int kRows = 12;
#elif defined(KVFERRY_ISA_avx2)
constexpr int kRows = 6;
#else
constexpr int kRows = 2;
#endif

// A panel of floats: row k of it starts at `values + k * stride`.
struct FloatPanel {
  const float* values;
  std::int64_t stride;
};

// A panel of bfloat16 in pairs: [depth / 2][16 columns][2].
struct PairPanel {
  const Bfloat16* values;
};

template <int Rows>
struct Sums {
  Floats values[Rows][kVectors];
};

// sums[r] += x[r] * panel, over `depth` rows of the panel.
template <int Rows>
inline void multiply(const float* x, std::int64_t x_stride, std::int64_t depth, FloatPanel panel, Sums<Rows>& sums) {
  for (std::int64_t k = 0; k < depth; ++k) {
    Floats columns[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = load(panel.values + k * panel.stride + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Floats factor = broadcast(x[r * x_stride + k]);
      for (int v = 0; v < kVectors; ++v) sums.values[r][v] += factor * columns[v];
    }
  }
}

// How many panels are multiplied at once: with few rows memory is what a product waits for, and it answers faster to
// several questions at a time. All their sums have to fit into the registers.
template <int Rows>
constexpr int kPanels = 4 * Rows <= kRows   ? 4
                        : 2 * Rows <= kRows ? 2
                                            : 1;

// The same for `depth` pairs and panels that lie one after the other.
template <int Rows, int Panels>
inline void multiply(const float* x, std::int64_t x_stride, std::int64_t depth, PairPanel panel,
                     Sums<Rows> (&sums)[Panels]) {
  for (std::int64_t k = 0; k < depth; ++k) {
    for (int p = 0; p < Panels; ++p) {
      Floats even[kVectors], odd[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        Ints pairs;
        std::memcpy(&pairs, panel.values + ((p * depth + k) * kTile + v * kLanes) * 2, sizeof pairs);
        even[v] = reinterpret_cast<Floats>(pairs << 16);
        odd[v] = reinterpret_cast<Floats>(pairs & static_cast<std::int32_t>(0xffff0000));
      }
      for (int r = 0; r < Rows; ++r) {
        const Floats first = broadcast(x[r * x_stride + 2 * k]), second = broadcast(x[r * x_stride + 2 * k + 1]);
        for (int v = 0; v < kVectors; ++v) {
          sums[p].values[r][v] += first * even[v];
          sums[p].values[r][v] += second * odd[v];
        }
      }
    }
  }
}

// Calls `tile(integral_constant<int, Rows>, first)` until `rows` rows are done.
template <int Rows = kRows, typename Tile>
inline void by_rows(std::int64_t rows, const Tile& tile, std::int64_t first = 0) {
  for (; rows - first >= Rows; first += Rows) tile(std::integral_constant<int, Rows>{}, first);
  if constexpr (Rows > 1) {
    if (first < rows) by_rows<Rows - 1>(rows, tile, first);
  }
}

}  // namespace kvferry::engine::KVFERRY_ISA
