#include "scatter.hpp"

#include <algorithm>

namespace kvferry {

void append(std::vector<Piece>& pieces, int64_t offset, int64_t length) {
  if (!pieces.empty() && pieces.back().offset + pieces.back().length == offset)
    pieces.back().length += length;
  else
    pieces.push_back({offset, length});
}

Scatter::Scatter(char* base, std::vector<Piece> pieces) : base_(base), pieces_(std::move(pieces)) {
  for (const Piece& piece : pieces_) left_ += static_cast<size_t>(piece.length);
}

Scatter Scatter::whole(void* memory, size_t bytes) {
  Scatter scatter;
  scatter.base_ = static_cast<char*>(memory);
  scatter.left_ = bytes;
  if (bytes > 0) scatter.pieces_.push_back({0, static_cast<int64_t>(bytes)});
  return scatter;
}

size_t Scatter::next(iovec* parts, size_t count, size_t bytes) const {
  size_t used = 0;
  int64_t skip = within_;
  for (size_t piece = piece_; piece < pieces_.size() && used < count && bytes > 0; ++piece, skip = 0) {
    const size_t length = std::min(bytes, static_cast<size_t>(pieces_[piece].length - skip));
    parts[used++] = {base_ + pieces_[piece].offset + skip, length};
    bytes -= length;
  }
  return used;
}

void Scatter::advance(size_t bytes) {
  left_ -= bytes;
  auto left = static_cast<int64_t>(bytes);
  while (left > 0) {
    const int64_t step = std::min(left, pieces_[piece_].length - within_);
    left -= step;
    within_ += step;
    if (within_ < pieces_[piece_].length) continue;
    ++piece_;
    within_ = 0;
  }
}

}  // namespace kvferry
