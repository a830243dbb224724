// Attention in tiles: some queries of one sequence, in all heads that share a KV head, meet the keys in portions, with
// a running maximum and sum of the softmax (FlashAttention-2, Dao 2023). Everything is computed in float.
#include "attention.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "halves.hpp"
#include "threads.hpp"
#include "tiles.hpp"

namespace kvferry::engine::KVFERRY_ISA {

namespace {

constexpr std::int64_t kKeys = 32;         // of a portion
constexpr std::int64_t kRowsPerTile = 96;  // queries times heads, about
constexpr float kNever = -std::numeric_limits<float>::infinity();

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
inline void transpose(FourInts (&rows)[4]) {
  const FourInts a = __builtin_shuffle(rows[0], rows[1], FourInts{0, 4, 1, 5});
  const FourInts b = __builtin_shuffle(rows[0], rows[1], FourInts{2, 6, 3, 7});
  const FourInts c = __builtin_shuffle(rows[2], rows[3], FourInts{0, 4, 1, 5});
  const FourInts d = __builtin_shuffle(rows[2], rows[3], FourInts{2, 6, 3, 7});
  rows[0] = __builtin_shuffle(a, c, FourInts{0, 1, 4, 5});
  rows[1] = __builtin_shuffle(a, c, FourInts{2, 3, 6, 7});
  rows[2] = __builtin_shuffle(b, d, FourInts{0, 1, 4, 5});
  rows[3] = __builtin_shuffle(b, d, FourInts{2, 3, 6, 7});
}

// A column of a panel: one element, or two of bfloat16, of four rows.
inline void put(FourInts column, const float*, float* panel) { std::memcpy(panel, &column, sizeof column); }

inline void put(FourInts column, const Bfloat16*, float* panel) {
  const FourInts even = column << 16, odd = column & static_cast<std::int32_t>(0xffff0000);
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
      FourInts fours[4];
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

// Where `count` tokens lie, from position `begin` on, and has the cache fetch them: blocks are anywhere, which nothing
// foresees.
template <typename T>
void locate(const Attention& a, const Tile& tile, std::int64_t begin, std::int64_t count, const T** tokens) {
  const Sequences& sequences = a.sequences;
  const std::int32_t* table = sequences.tables + tile.sequence * sequences.table_width;
  const std::int64_t index = begin - sequences.first_keys[tile.sequence];
  const std::int64_t bytes = (a.pages.value_start ? a.pages.key_dim + a.pages.value_dim : a.pages.key_dim) * sizeof(T);
  std::int64_t block = index / sequences.block_size, offset = index % sequences.block_size;
  for (std::int64_t key = 0; key < count; ++key) {
    tokens[key] = static_cast<const T*>(a.pages.data) + table[block] * a.pages.block_stride +
                  tile.kv_head * a.pages.head_stride + offset * a.pages.token_stride;
    const char* content = reinterpret_cast<const char*>(tokens[key]);
    for (std::int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(content + line);
    if (++offset == sequences.block_size) {
      offset = 0;
      ++block;
    }
  }
}

// With few rows, making panels would cost more than the products: rows of pages are multiplied where they lie.
constexpr std::int64_t kFewRows = 8;
constexpr int kTogether = kLanes == 4 ? 1 : 3;  // rows whose sums fit into the registers

bool straight(const Attention& a, std::int64_t rows) {
  return rows <= kFewRows && a.pages.key_dim % kBoth == 0 && a.pages.value_dim % (2 * kBoth) == 0;
}

template <int Rows, typename T>
void score_rows(const float* query, std::int64_t depth, const T* const* tokens, std::int64_t count, float* scores) {
  for (std::int64_t key = 0; key < count; ++key) {
    Both sums[Rows];
    for (int r = 0; r < Rows; ++r) sums[r] = {Floats{}, Floats{}};
    for (std::int64_t k = 0; k < depth; k += kBoth) {
      const Both content = load_both(tokens[key] + k);
      for (int r = 0; r < Rows; ++r) {
        const Both factor = load_both(query + r * depth + k);
        sums[r].first += factor.first * content.first;
        sums[r].second += factor.second * content.second;
      }
    }
    for (int r = 0; r < Rows; ++r) scores[r * kKeys + key] = sum(sums[r].first + sums[r].second);
  }
}

template <int Rows, typename T>
void accumulate_rows(const float* weights, const T* const* values, std::int64_t count, std::int64_t width,
                     const float* shrunk, float* output) {
  for (std::int64_t column = 0; column < width; column += 2 * kBoth) {
    Both sums[Rows][2];
    for (int r = 0; r < Rows; ++r) {
      const Floats factor = broadcast(shrunk[r]);
      for (int half = 0; half < 2; ++half) {
        const Both old = load_both(output + r * width + column + half * kBoth);
        sums[r][half] = {old.first * factor, old.second * factor};
      }
    }
    for (std::int64_t key = 0; key < count; ++key) {
      for (int half = 0; half < 2; ++half) {
        const Both content = load_both(values[key] + column + half * kBoth);
        for (int r = 0; r < Rows; ++r) {
          const Floats weight = broadcast(weights[r * kKeys + key]);
          sums[r][half].first += weight * content.first;
          sums[r][half].second += weight * content.second;
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int half = 0; half < 2; ++half) store_both(sums[r][half], output + r * width + column + half * kBoth);
    }
  }
}

// Keys from position `begin` on, as panels [kKeys / 16][key_dim][16], and their values, [kKeys][value_dim rounded up].
// What is never written is 0 here: stale bits may be NaN, and `0 * NaN` is NaN.
template <typename T>
void gather(const Attention& a, const T* const* tokens, std::int64_t count, Scratch& scratch) {
  const Pages& pages = a.pages;
  const std::int64_t width = up(pages.value_dim), depth = pages.key_dim;
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
  const bool few = straight(a, rows);
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
    if (few) {
      for (std::int64_t k = 0; k < depth; k += kBoth) store_both(load_both(from + k), to + k);
    } else {
      to_floats(from, depth, to);
    }
    for (std::int64_t k = 0; k < depth; ++k) to[k] *= a.scaling;
    if (a.sinks) {
      scratch.maximum[row] = a.sinks[head];
      scratch.sum[row] = 1.0f;
    }
  }
  const std::int64_t end = tile.first_position + tile.num_queries;
  std::int64_t begin = oldest(a, a.sequences.first_keys[tile.sequence], tile.first_position);
  const T* tokens[kKeys];
  const T* next_tokens[kKeys];
  locate(a, tile, begin, std::min(kKeys, end - begin), next_tokens);
  for (; begin < end; begin += kKeys) {
    const std::int64_t count = std::min(kKeys, end - begin);
    std::copy_n(next_tokens, count, tokens);
    locate(a, tile, begin + count, std::min(kKeys, end - begin - count), next_tokens);
    if (few) {
      by_rows<kTogether>(rows, [&](auto number, std::int64_t row) {
        score_rows<decltype(number)::value>(scratch.query.data() + row * depth, depth, tokens, count,
                                            scratch.scores.data() + row * kKeys);
      });
    } else {
      gather<T>(a, tokens, count, scratch);
      score(a, tile, count, scratch);
    }
    for (std::int64_t row = 0; row < rows; ++row) scratch.shrunk[row] = soften(a, tile, row, begin, count, scratch);
    if (few) {
      for (std::int64_t key = 0; key < count; ++key) tokens[key] += a.pages.value_start;
      by_rows<kTogether>(rows, [&](auto number, std::int64_t row) {
        accumulate_rows<decltype(number)::value>(scratch.scores.data() + row * kKeys, tokens, count, width,
                                                 scratch.shrunk.data() + row, scratch.output.data() + row * width);
      });
    } else {
      accumulate(a, tile, count, scratch.shrunk.data(), scratch);
    }
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t head = tile.kv_head * a.heads_per_kv + row % a.heads_per_kv;
    float* values = scratch.output.data() + row * width;
    for (std::int64_t column = 0; column < a.pages.value_dim; ++column) values[column] /= scratch.sum[row];
    const std::int64_t token = tile.first_row + row / a.heads_per_kv;
    T* to = static_cast<T*>(a.output) + (token * heads + head) * a.pages.value_dim;
    if (few) {
      for (std::int64_t k = 0; k < a.pages.value_dim; k += kBoth) store_both(load_both(values + k), to + k);
    } else {
      from_floats(values, a.pages.value_dim, to);
    }
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
