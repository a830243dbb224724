// Attention in tiles: some queries of one sequence, in all heads that share a KV head, meet the keys in portions, with
// a running maximum and sum of the softmax (FlashAttention-2, Dao 2023). Everything is computed in float.
#include "attention.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "threads.hpp"
#include "tiles.hpp"

namespace kvferry::engine::KVFERRY_ISA {

namespace {

constexpr std::int64_t kKeys = 32;         // of a portion
constexpr std::int64_t kRowsPerTile = 96;  // queries times heads, about
constexpr float kNever = -std::numeric_limits<float>::infinity();

typedef std::int32_t Fours __attribute__((vector_size(16)));

struct Tile {
  std::int64_t sequence, kv_head, first_row, num_queries, first_position;
};

struct Scratch {
  std::vector<float> query, keys, values, scores, output, maximum, sum, shrunk;
};

std::int64_t up(std::int64_t count) { return (count + kTile - 1) / kTile * kTile; }

// The oldest key that a query at a position sees.
std::int64_t oldest(const Attention& a, std::int64_t first_key, std::int64_t position) {
  std::int64_t key = first_key;
  if (a.window) key = std::max(key, position - a.window + 1);
  if (a.chunk) key = std::max(key, position / a.chunk * a.chunk);
  return key;
}

// Four rows of four elements become four columns.
inline void transpose(Fours (&rows)[4]) {
  const Fours a = __builtin_shuffle(rows[0], rows[1], Fours{0, 4, 1, 5});
  const Fours b = __builtin_shuffle(rows[0], rows[1], Fours{2, 6, 3, 7});
  const Fours c = __builtin_shuffle(rows[2], rows[3], Fours{0, 4, 1, 5});
  const Fours d = __builtin_shuffle(rows[2], rows[3], Fours{2, 6, 3, 7});
  rows[0] = __builtin_shuffle(a, c, Fours{0, 1, 4, 5});
  rows[1] = __builtin_shuffle(a, c, Fours{2, 3, 6, 7});
  rows[2] = __builtin_shuffle(b, d, Fours{0, 1, 4, 5});
  rows[3] = __builtin_shuffle(b, d, Fours{2, 3, 6, 7});
}

// A column of a panel: one element, or two of bfloat16, of four rows.
inline void put(Fours column, const float*, float* panel) { std::memcpy(panel, &column, sizeof column); }

inline void put(Fours column, const Bfloat16*, float* panel) {
  const Fours even = column << 16, odd = column & static_cast<std::int32_t>(0xffff0000);
  std::memcpy(panel, &even, sizeof even);
  std::memcpy(panel + kTile, &odd, sizeof odd);
}

// `count` rows of `depth` become columns of a panel [depth][16].
template <typename T>
void to_panel(const T* const* rows, std::int64_t count, std::int64_t depth, float* panel) {
  constexpr std::int64_t kStep = 16 / sizeof(T), kEach = 4 / sizeof(T);  // elements in 16 bytes, and in 4
  const std::int64_t whole = depth / kStep * kStep;
  std::int64_t row = 0;
  for (; row + 4 <= count; row += 4) {
    for (std::int64_t k = 0; k < whole; k += kStep) {
      Fours fours[4];
      for (int r = 0; r < 4; ++r) std::memcpy(&fours[r], rows[row + r] + k, sizeof fours[r]);
      transpose(fours);
      for (int column = 0; column < 4; ++column) {
        put(fours[column], rows[row], panel + (k + column * kEach) * kTile + row);
      }
    }
    for (int r = 0; r < 4; ++r) {
      for (std::int64_t k = whole; k < depth; ++k) panel[k * kTile + row + r] = to_float(rows[row + r][k]);
    }
  }
  for (; row < count; ++row) {
    for (std::int64_t k = 0; k < depth; ++k) panel[k * kTile + row] = to_float(rows[row][k]);
  }
}

// Where the token at a position lies.
template <typename T>
const T* token_at(const Attention& a, const Tile& tile, std::int64_t position) {
  const Sequences& sequences = a.sequences;
  const std::int64_t index = position - sequences.first_keys[tile.sequence];
  const std::int32_t block = sequences.tables[tile.sequence * sequences.table_width + index / sequences.block_size];
  return static_cast<const T*>(a.pages.data) + block * a.pages.block_stride + tile.kv_head * a.pages.head_stride +
         index % sequences.block_size * a.pages.token_stride;
}

// Has the cache fetch the next portion while this one is computed: it lies in other blocks, which nothing foresees.
template <typename T>
void fetch(const Attention& a, const Tile& tile, std::int64_t begin, std::int64_t count) {
  const std::int64_t bytes = (a.pages.value_start ? a.pages.key_dim + a.pages.value_dim : a.pages.key_dim) * sizeof(T);
  for (std::int64_t key = 0; key < count; ++key) {
    const char* token = reinterpret_cast<const char*>(token_at<T>(a, tile, begin + key));
    for (std::int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(token + line);
  }
}

// Keys from position `begin` on, as panels [kKeys / 16][key_dim][16], and their values, [kKeys][value_dim rounded up].
// What is never written is 0 here: stale bits may be NaN, and `0 * NaN` is NaN.
template <typename T>
void gather(const Attention& a, const Tile& tile, std::int64_t begin, std::int64_t count, Scratch& scratch) {
  const Pages& pages = a.pages;
  const std::int64_t width = up(pages.value_dim), depth = pages.key_dim;
  const T* tokens[kKeys];
  for (std::int64_t key = 0; key < count; ++key) tokens[key] = token_at<T>(a, tile, begin + key);
  for (std::int64_t first = 0; first < count; first += kTile) {
    float* panel = scratch.keys.data() + first * depth;
    const std::int64_t here = std::min<std::int64_t>(kTile, count - first);
    if (here < kTile) std::fill_n(panel, kTile * depth, 0.0f);
    to_panel(tokens + first, here, pages.key_dim, panel);
  }
  for (std::int64_t key = 0; key < count; ++key) {
    to_floats(tokens[key] + pages.value_start, pages.value_dim, scratch.values.data() + key * width);
  }
}

// Scores of one row become weights; returns by how much what was summed before has to shrink.
float weigh(float* scores, std::int64_t count, float& maximum, float& sum) {
  float highest = maximum;
#pragma omp simd reduction(max : highest)
  for (std::int64_t key = 0; key < count; ++key) highest = std::max(highest, scores[key]);
  if (highest == kNever) highest = 0.0f;
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (std::int64_t key = 0; key < count; ++key) {
    scores[key] = exponential(scores[key] - highest);
    total += scores[key];
  }
  const float shrunk = exponential(maximum - highest);
  sum = sum * shrunk + total;
  maximum = highest;
  return shrunk;
}

// Scores of the tile's rows with a portion of keys.
void score(const Attention& a, const Tile& tile, std::int64_t count, Scratch& scratch) {
  const std::int64_t depth = a.pages.key_dim, rows = tile.num_queries * a.heads_per_kv;
  for (std::int64_t first = 0; first < count; first += kTile) {
    const FloatPanel panel{scratch.keys.data() + first * depth, kTile};
    by_rows(rows, [&](auto number, std::int64_t row) {
      constexpr int kNumber = decltype(number)::value;
      Sums<kNumber> sums{};
      multiply<kNumber>(scratch.query.data() + row * depth, depth, depth, panel, sums);
      for (int r = 0; r < kNumber; ++r) {
        float* to = scratch.scores.data() + (row + r) * kKeys + first;
        for (int v = 0; v < kVectors; ++v) store(to + v * kLanes, sums.values[r][v]);
      }
    });
  }
}

// The weights of a row's keys that it sees; the others' are 0.
float soften(const Attention& a, const Tile& tile, std::int64_t row, std::int64_t begin, std::int64_t count,
             Scratch& scratch) {
  const std::int64_t position = tile.first_position + row / a.heads_per_kv;
  const std::int64_t seen = oldest(a, a.sequences.first_keys[tile.sequence], position);
  const std::int64_t low = std::min(count, std::max<std::int64_t>(0, seen - begin));
  const std::int64_t high = std::max(low, std::min(count, position + 1 - begin));
  float* scores = scratch.scores.data() + row * kKeys;
  if (a.softcap > 0.0f) {
    for (std::int64_t key = low; key < high; ++key) {
      scores[key] = a.softcap * (1.0f - 2.0f / (exponential(scores[key] * (2.0f / a.softcap)) + 1.0f));
    }
  }
  const float shrunk = low == high ? 1.0f : weigh(scores + low, high - low, scratch.maximum[row], scratch.sum[row]);
  std::fill(scores, scores + low, 0.0f);
  std::fill(scores + high, scores + count, 0.0f);
  return shrunk;
}

// output = output * shrunk + weights * values
void accumulate(const Attention& a, const Tile& tile, std::int64_t count, const float* shrunk, Scratch& scratch) {
  const std::int64_t width = up(a.pages.value_dim), rows = tile.num_queries * a.heads_per_kv;
  for (std::int64_t column = 0; column < width; column += kTile) {
    const FloatPanel panel{scratch.values.data() + column, width};
    by_rows(rows, [&](auto number, std::int64_t row) {
      constexpr int kNumber = decltype(number)::value;
      Sums<kNumber> sums;
      float* to = scratch.output.data() + row * width + column;
      for (int r = 0; r < kNumber; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          sums.values[r][v] = load(to + r * width + v * kLanes) * broadcast(shrunk[row + r]);
        }
      }
      multiply<kNumber>(scratch.scores.data() + row * kKeys, kKeys, count, panel, sums);
      for (int r = 0; r < kNumber; ++r) {
        for (int v = 0; v < kVectors; ++v) store(to + r * width + v * kLanes, sums.values[r][v]);
      }
    });
  }
}

template <typename T>
void attend_tile(const Attention& a, const Tile& tile) {
  static thread_local Scratch scratch;
  const std::int64_t depth = a.pages.key_dim, width = up(a.pages.value_dim);
  const std::int64_t rows = tile.num_queries * a.heads_per_kv, heads = a.kv_heads * a.heads_per_kv;
  scratch.query.resize(rows * depth);
  scratch.keys.resize(kKeys * depth);
  scratch.values.resize(kKeys * width);
  scratch.scores.resize(rows * kKeys);
  scratch.output.assign(rows * width, 0.0f);
  scratch.maximum.assign(rows, kNever);
  scratch.sum.assign(rows, 0.0f);
  scratch.shrunk.resize(rows);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t head = tile.kv_head * a.heads_per_kv + row % a.heads_per_kv;
    const T* from = static_cast<const T*>(a.query) + (tile.first_row + row / a.heads_per_kv) * a.query_token_stride +
                    head * a.query_head_stride;
    float* to = scratch.query.data() + row * depth;
    to_floats(from, depth, to);
    for (std::int64_t k = 0; k < depth; ++k) to[k] *= a.scaling;
    if (a.sinks) {
      scratch.maximum[row] = a.sinks[head];
      scratch.sum[row] = 1.0f;
    }
  }
  const std::int64_t end = tile.first_position + tile.num_queries;
  std::int64_t begin = oldest(a, a.sequences.first_keys[tile.sequence], tile.first_position);
  for (; begin < end; begin += kKeys) {
    const std::int64_t count = std::min(kKeys, end - begin);
    gather<T>(a, tile, begin, count, scratch);
    fetch<T>(a, tile, begin + count, std::min(kKeys, end - begin - count));
    score(a, tile, count, scratch);
    for (std::int64_t row = 0; row < rows; ++row) scratch.shrunk[row] = soften(a, tile, row, begin, count, scratch);
    accumulate(a, tile, count, scratch.shrunk.data(), scratch);
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t head = tile.kv_head * a.heads_per_kv + row % a.heads_per_kv;
    float* values = scratch.output.data() + row * width;
    for (std::int64_t column = 0; column < a.pages.value_dim; ++column) values[column] /= scratch.sum[row];
    const std::int64_t token = tile.first_row + row / a.heads_per_kv;
    from_floats(values, a.pages.value_dim, static_cast<T*>(a.output) + (token * heads + head) * a.pages.value_dim);
  }
}

}  // namespace

void attend(const Attention& a) {
  std::vector<Tile> tiles;
  const std::int64_t queries_per_tile = std::max<std::int64_t>(1, kRowsPerTile / a.heads_per_kv);
  for (std::int64_t sequence = 0; sequence < a.sequences.count; ++sequence) {
    const std::int64_t first_row = a.sequences.query_starts[sequence];
    const std::int64_t num_queries = a.sequences.query_starts[sequence + 1] - first_row;
    const std::int64_t first_position = a.sequences.lengths[sequence] - num_queries;
    for (std::int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
      for (std::int64_t query = 0; query < num_queries; query += queries_per_tile) {
        const std::int64_t count = std::min(queries_per_tile, num_queries - query);
        tiles.push_back({sequence, kv_head, first_row + query, count, first_position + query});
      }
    }
  }
  parallel(static_cast<std::int64_t>(tiles.size()), [&](std::int64_t index) {
    if (a.pages.bfloat16) {
      attend_tile<Bfloat16>(a, tiles[index]);
    } else {
      attend_tile<float>(a, tiles[index]);
    }
  });
}

}  // namespace kvferry::engine::KVFERRY_ISA
