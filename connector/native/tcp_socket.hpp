// Non-blocking stream sockets: bytes straight from and into scattered memory, resumed exactly where they stopped.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "scatter.hpp"

namespace kvferry {

// Moved by one call at most: the lock is held meanwhile, and one connection must not keep the others waiting. Small
// enough, too, that the receiver finds in the caches what the sender has just put there.
constexpr size_t kStepBytes = 512 << 10;

enum class Moved {
  kAll,    // what was wanted has been moved
  kSome,   // there may be more to move at once
  kNone,   // wait until the socket is ready again
  kEnded,  // the other end has closed the connection, or reset it
  kFailed  // errno says why
};

class Socket {
 public:
  // Owns `fd`, and makes it non-blocking.
  explicit Socket(int fd);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int fd() const { return fd_; }
  void tune();
  // An error with which unanswered data counts as lost, for the initiator's end.
  void give_up_after(double seconds);
  int error() const;
  // What has been sent and not arrived yet is thrown away, and the other end is told so.
  void reset_on_close();

  // Until `wanted` is done, at most kStepBytes. What comes behind it is kept for the next call.
  Moved receive(Scatter& wanted);
  // `head`, then `body`, at most kStepBytes.
  Moved send(Scatter& head, Scatter& body);
  bool has_kept() const { return begin_ < end_; }

 private:
  void wake_for(size_t wanted);
  Moved receive_into(Scatter& wanted);

  int fd_;
  size_t woken_for_ = 1;
  size_t begin_ = 0, end_ = 0;  // what is kept
  std::array<char, 16 << 10> kept_;
};

// A message under way: its head, which it owns, and bytes of registered memory.
struct Message {
  Message(std::vector<char> head_bytes, Scatter body_)
      : owned(std::move(head_bytes)), head(Scatter::whole(owned.data(), owned.size())), body(std::move(body_)) {}
  std::vector<char> owned;
  Scatter head;
  Scatter body;
};

}  // namespace kvferry
