#include <cstring>

#include "attention.hpp"

namespace kvferry::engine {

void store_pages(const Storing& storing) {
  const Pages& pages = storing.pages;
  const std::int64_t item = pages.bfloat16 ? 2 : 4;
  const auto* key = static_cast<const char*>(storing.key);
  const auto* value = static_cast<const char*>(storing.value);
  for (std::int64_t token = 0; token < storing.tokens; ++token) {
    for (std::int64_t head = 0; head < storing.kv_heads; ++head) {
      char* to = static_cast<char*>(pages.data) +
                 item * (storing.blocks[token] * pages.block_stride + head * pages.head_stride +
                         storing.offsets[token] * pages.token_stride);
      std::memcpy(to, key + item * (token * storing.key_token_stride + head * storing.key_head_stride),
                  item * pages.key_dim);
      std::memcpy(to + item * pages.key_dim,
                  value + item * (token * storing.value_token_stride + head * storing.value_head_stride),
                  item * storing.stored_value_dim);
    }
  }
}

}  // namespace kvferry::engine
