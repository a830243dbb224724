// Causal attention of a ragged batch over pages.
#pragma once

#include <cstdint>

#include "isa.hpp"

namespace kvferry::engine {

// Strides count elements. A page's content is contiguous: a key of `key_dim`, and the value of `value_dim` from
// `value_start` on, which may lie within the key.
struct Pages {
  void* data;
  std::int64_t block_stride, head_stride, token_stride;
  std::int64_t key_dim, value_dim, value_start;
  bool bfloat16;  // otherwise float
};

// Like Python's PagedSequences.
struct Sequences {
  const std::int32_t* tables;  // [count, table_width]
  std::int64_t table_width;
  const std::int32_t *first_keys, *lengths, *query_starts;
  std::int64_t count, block_size;
};

struct Attention {
  Pages pages;
  Sequences sequences;
  const void* query;  // [tokens, heads, key_dim] with these strides, of the pages' type
  std::int64_t query_token_stride, query_head_stride;
  void* output;        // [tokens, heads, value_dim], contiguous
  const float* sinks;  // [heads], or null
  std::int64_t kv_heads, heads_per_kv;
  float scaling, softcap;
  std::int64_t window, chunk;  // tokens; 0: without
};

struct Storing {
  Pages pages;
  const void *key, *value;  // [tokens, kv_heads, key_dim] and [.., value_dim]; only the last stride is 1
  std::int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  const std::int64_t *blocks, *offsets;  // [tokens]
  std::int64_t tokens, kv_heads, stored_value_dim;
};

KVFERRY_DECLARE(void attend(const Attention& attention))

// Write keys and values into their pages.
void store_pages(const Storing& storing);

}  // namespace kvferry::engine
