// What is said on a data connection. Both ends have the same byte order: another one is a wrong magic.
//
// An initiator says hello, then sends requests without waiting for their replies. A request's pieces follow it, and the
// bytes of a WRITE follow those. Replies come in the order of the requests, and the bytes of a READ follow its reply. A
// refused request is the last that is answered.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "scatter.hpp"

namespace kvferry {

constexpr size_t kSecretBytes = 32;
using Secret = std::array<unsigned char, kSecretBytes>;

constexpr uint64_t kHelloMagic = 0x3150435446564BULL;  // "KVFTCP1"
constexpr uint64_t kRequestMagic = 0x71657246564BULL;
constexpr uint64_t kReplyMagic = 0x70657246564BULL;

// More are sent as several requests, so that a request's table stays small.
constexpr int64_t kMostPieces = 1 << 16;

struct Hello {
  uint64_t magic;
  Secret secret;
};

enum class Asked : uint64_t { kRead = 1, kWrite = 2 };

struct Request {
  uint64_t magic;
  Asked asked;
  int64_t batch;
  int64_t region;
  int64_t pieces;
  int64_t bytes;
};

enum class Status : uint64_t { kDone = 0, kRefused = 1 };

struct Reply {
  uint64_t magic;
  Status status;
  int64_t batch;
  int64_t bytes;  // that follow
};

static_assert(sizeof(Hello) == 40 && sizeof(Request) == 48 && sizeof(Reply) == 32 && sizeof(Piece) == 16);

// In a time that does not depend on where they differ.
inline bool equal(const Secret& one, const Secret& other) {
  volatile unsigned char differences = 0;
  for (size_t i = 0; i < kSecretBytes; ++i) differences = differences | (one[i] ^ other[i]);
  return differences == 0;
}

}  // namespace kvferry
