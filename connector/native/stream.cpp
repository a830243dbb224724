#include "stream.hpp"

#include <algorithm>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace kvferry {

#ifdef __SSE2__

namespace {

constexpr size_t kLine = 64;
constexpr size_t kAhead = 8 * kLine;

}  // namespace

void copy_streaming(char* destination, const char* source, size_t bytes) {
  const size_t head = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(destination) % kLine) % kLine);
  std::memcpy(destination, source, head);
  size_t done = head;
  for (; bytes - done >= kLine; done += kLine) {
    _mm_prefetch(source + done + kAhead, _MM_HINT_NTA);
    const auto* from = reinterpret_cast<const __m128i*>(source + done);
    auto* to = reinterpret_cast<__m128i*>(destination + done);
    const __m128i first = _mm_loadu_si128(from);
    const __m128i second = _mm_loadu_si128(from + 1);
    const __m128i third = _mm_loadu_si128(from + 2);
    const __m128i fourth = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, first);
    _mm_stream_si128(to + 1, second);
    _mm_stream_si128(to + 2, third);
    _mm_stream_si128(to + 3, fourth);
  }
  std::memcpy(destination + done, source + done, bytes - done);
}

void end_streaming() { _mm_sfence(); }

#else

void copy_streaming(char* destination, const char* source, size_t bytes) { std::memcpy(destination, source, bytes); }

void end_streaming() {}

#endif

}  // namespace kvferry
