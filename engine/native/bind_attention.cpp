#include <nanobind/nanobind.h>

#include "attention.hpp"
#include "bind.hpp"

namespace nb = nanobind;

namespace kvferry::engine {

namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<Pages>(module, "Pages")
      .def(
          "__init__",
          [](Pages* self, Address data, std::int64_t block_stride, std::int64_t head_stride, std::int64_t token_stride,
             std::int64_t key_dim, std::int64_t value_dim, std::int64_t value_start, bool bfloat16) {
            new (self) Pages{at<void>(data), block_stride, head_stride, token_stride,
                             key_dim,        value_dim,    value_start, bfloat16};
          },
          nb::kw_only(), nb::arg("data"), nb::arg("block_stride"), nb::arg("head_stride"), nb::arg("token_stride"),
          nb::arg("key_dim"), nb::arg("value_dim"), nb::arg("value_start"), nb::arg("bfloat16"));
  nb::class_<Sequences>(module, "Sequences")
      .def(
          "__init__",
          [](Sequences* self, Address tables, std::int64_t table_width, Address first_keys, Address lengths,
             Address query_starts, std::int64_t count, std::int64_t block_size) {
            using Numbers = const std::int32_t;
            new (self) Sequences{at<Numbers>(tables),
                                 table_width,
                                 at<Numbers>(first_keys),
                                 at<Numbers>(lengths),
                                 at<Numbers>(query_starts),
                                 count,
                                 block_size};
          },
          nb::kw_only(), nb::arg("tables"), nb::arg("table_width"), nb::arg("first_keys"), nb::arg("lengths"),
          nb::arg("query_starts"), nb::arg("count"), nb::arg("block_size"));
  module.def(
      "attend",
      [](const Pages& pages, const Sequences& sequences, Address query, std::int64_t query_token_stride,
         std::int64_t query_head_stride, Address output, Address sinks, std::int64_t kv_heads,
         std::int64_t heads_per_kv, float scaling, float softcap, std::int64_t window, std::int64_t chunk) {
        const Attention attention{pages,
                                  sequences,
                                  at<const void>(query),
                                  query_token_stride,
                                  query_head_stride,
                                  at<void>(output),
                                  at<const float>(sinks),
                                  kv_heads,
                                  heads_per_kv,
                                  scaling,
                                  softcap,
                                  window,
                                  chunk};
        KVFERRY_DISPATCH(attend, attention);
      },
      nb::kw_only(), nb::arg("pages"), nb::arg("sequences"), nb::arg("query"), nb::arg("query_token_stride"),
      nb::arg("query_head_stride"), nb::arg("output"), nb::arg("sinks"), nb::arg("kv_heads"), nb::arg("heads_per_kv"),
      nb::arg("scaling"), nb::arg("softcap"), nb::arg("window"), nb::arg("chunk"),
      nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "store",
      [](const Pages& pages, Address key, std::int64_t key_token_stride, std::int64_t key_head_stride, Address value,
         std::int64_t value_token_stride, std::int64_t value_head_stride, std::int64_t stored_value_dim, Address blocks,
         Address offsets, std::int64_t tokens, std::int64_t kv_heads) {
        store_pages({pages, at<const void>(key), at<const void>(value), key_token_stride, key_head_stride,
                     value_token_stride, value_head_stride, at<const std::int64_t>(blocks),
                     at<const std::int64_t>(offsets), tokens, kv_heads, stored_value_dim});
      },
      nb::kw_only(), nb::arg("pages"), nb::arg("key"), nb::arg("key_token_stride"), nb::arg("key_head_stride"),
      nb::arg("value"), nb::arg("value_token_stride"), nb::arg("value_head_stride"), nb::arg("stored_value_dim"),
      nb::arg("blocks"), nb::arg("offsets"), nb::arg("tokens"), nb::arg("kv_heads"),
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace kvferry::engine
