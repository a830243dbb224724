// Pieces of one memory that a stream of bytes comes from or goes to, and how far it has come.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvferry {

// As it travels in a request, too.
struct Piece {
  int64_t offset;
  int64_t length;
};

// Appends a piece, or lengthens the last one where it continues it.
void append(std::vector<Piece>& pieces, int64_t offset, int64_t length);

class Scatter {
 public:
  Scatter() = default;
  // No piece is empty.
  Scatter(char* base, std::vector<Piece> pieces);
  static Scatter whole(void* memory, size_t bytes);

  bool done() const { return left_ == 0; }
  size_t left() const { return left_; }  // bytes
  // Fills `parts` with what comes next, at most `count` parts of together at most `bytes`; how many it took.
  size_t next(iovec* parts, size_t count, size_t bytes) const;
  void advance(size_t bytes);

 private:
  char* base_ = nullptr;
  std::vector<Piece> pieces_;
  size_t left_ = 0;
  size_t piece_ = 0;
  int64_t within_ = 0;  // bytes of the current piece that are done
};

}  // namespace kvferry
